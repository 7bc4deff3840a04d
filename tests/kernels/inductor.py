"""Inspect the code that Inductor generates for the operators, without a GPU: ``python tests/kernels/inductor.py``.

The script traces calls on fake CUDA tensors, lets Inductor generate code, and compiles its kernels for sm_90. A
description of an H100 replaces the driver. It prints one JSON line per case, for test_compiled.py. Arguments are names
of cases; without them, it runs all cases.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

assert "TRITON_INTERPRET" not in os.environ, "compiling needs triton without its interpreter"

import torch
import triton
from aot import count_contracted
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lrpe_md import Coordinates, Grid, Norm
from lrpe_md.engine.core import launching
from lrpe_md.engine.core.call import CallerTables, CosSin, Needs, Options, Weights
from lrpe_md.engine.core.memory import accumulator
from lrpe_md.engine.core.norms import take_norm
from lrpe_md.engine.core.recording import COMPILER_OPTIONS
from lrpe_md.engine.encode.operator import ENCODE
from lrpe_md.engine.encode.validate import validate
from lrpe_md.engine.inductor import lowering as compiled
from lrpe_md.engine.linear.call import LinearNeeds, LinearOptions, Operands, Sides
from lrpe_md.engine.linear.operator import ATTEND
from lrpe_md.engine.linear.validate import validate_linear

TARGET = GPUTarget("cuda", 90, 32)
SIZES = {"major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32, "regs_per_multiprocessor": 65536}
SIZES |= {"max_threads_per_multi_processor": 2048, "shared_memory_per_block_optin": 232448, "total_memory": 80 * 2**30}
SIZES |= {"shared_memory_per_block": 49152, "shared_memory_per_multiprocessor": 233472, "L2_cache_size": 50 * 2**20}
H100 = SimpleNamespace(name="NVIDIA H100", gcnArchName="", **SIZES)


class Driver:
    """Fake Triton driver that can compile but not launch."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class Written(Exception):
    """Raised when the code is complete, because the code can't run."""


def describe_gpu() -> None:
    """Describe an H100 to all callers that query the GPU."""
    triton.runtime.driver.set_active(Driver())  # pyright: ignore[reportAttributeAccessIssue]
    launching.has_ptx = lambda dtype: dtype != torch.float64
    torch.cuda.get_device_properties = lambda *args: H100
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    torch.cuda.current_device = lambda: 0
    answers: dict[str, Any] = {
        "is_available": True, "raise_if_triton_unavailable": None, "current_device": 0, "is_bf16_supported": True,
        "get_compute_capability": 90, "get_device_properties": H100,
    }  # fmt: skip
    for owner, names in ((CudaInterface, answers), (CudaInterface.Worker, ("get_device_properties", "current_device"))):
        for name in names:
            setattr(owner, name, staticmethod(lambda *args, _found=answers[name], **kwargs: _found))
    fields = {"type": "cuda", "index": 0, "cc": 90, **SIZES}
    known = {k: v for k, v in fields.items() if k in DeviceProperties.__annotations__}
    DeviceProperties.create = classmethod(lambda cls, device: cls(**known))


def write_code(f: Callable[..., Any], tensors: Sequence[Tensor], dynamic: bool) -> list[tuple[str, Loose]]:
    """Return Inductor's code for f on fake CUDA tensors like these, and the numbers of movable allocations."""
    found: list[tuple[str, Loose]] = []
    codegen = GraphLowering.codegen

    def listen(graph: GraphLowering) -> Any:
        code, *_ = codegen(graph)
        found.append((code.value, count_loose(graph)))
        raise Written

    def never(args: Any) -> Any:
        raise Written

    def compile_inner(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        try:
            compile_fx_inner(graph, inputs, **kwargs)
        except Exception as error:
            if not caused_by(error, Written):
                raise
        never._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return never

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=compile_inner)

    with mock.patch.object(GraphLowering, "codegen", listen), FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in tensors]
        try:
            torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)(*fakes)
        except Exception as error:
            if not caused_by(error, Written):
                raise
    return found


class Loose(NamedTuple):
    """Allocations that could move before a model's first layer. The memory of all layers would then be used at once."""

    independent: int  # don't depend on any input
    on_inputs: int  # depend only on graph inputs


def count_loose(graph: GraphLowering) -> Loose:
    reads = [
        {dep.name for dep in node.read_writes.reads}
        for node in graph.scheduler.nodes
        if isinstance(node, NopKernelSchedulerNode)
    ]
    return Loose(reads.count(set()), sum(names <= graph.graph_inputs.keys() for names in reads))


def caused_by(error: BaseException | None, kind: type) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__ or getattr(error, "inner_exception", None)
    return error is not None


def compile_kernels(code: str) -> dict[str, dict[str, int]]:
    """Return the registers of each lrpe-md kernel in the code, and its contracted products."""
    found = {}
    for name, source in re.findall(r"async_compile\.triton\('(fixed_\w+)', '''(.*?)''', device_str", code, re.DOTALL):
        tuners: list[Any] = []
        with mock.patch.object(triton_heuristics, "cached_autotune", partial(note, tuners)):
            path = f"<{hash(source)}>"
            linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
            exec(compile(source, path, "exec"), {"__name__": name, "__file__": path})
        ((fn, meta, cfg),) = tuners
        options = {"num_warps": cfg.num_warps, "num_stages": cfg.num_stages, **meta.get("backend_options", {})}
        options |= {key: meta[key] for key in COMPILER_OPTIONS if key in meta}
        constants = {**meta["constants"], **cfg.kwargs}
        made = triton.compile(
            ASTSource(fn, meta["signature"], constants, meta["configs"][0]), target=TARGET, options=options
        )
        found[name] = {"registers": count_registers(made.asm["cubin"]), "contracted": count_contracted(made.asm)}
    return found


def make_launchers(code: str) -> dict[str, int]:
    """Return the register limits of kernels that Triton launches from the code."""
    found = re.findall(r"^(fixed_\w+)_launcher_\d+ = (.*)$", code, re.MULTILINE)
    return {name: eval(made).options["maxnreg"] for name, made in found}


def count_registers(cubin: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    (registers,) = re.findall(r"REG:(\d+)", out.stdout)
    return int(registers)


def note(tuners: list[Any], size_hints: Any, configs: list[Any], triton_meta: Any, **kwargs: Any) -> Callable[..., Any]:
    def decorate(fn: Any) -> Any:
        (config,) = configs
        tuners.append((fn, triton_meta, config))
        return fn

    return decorate


def count_arguments(listed: str) -> int:
    """Count the arguments of a launch, except those that are compiled in."""
    return len(re.findall(r"\b(?:buf|arg)\d+", listed))


# --- cases -------------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "map": "rotate", "act": "none", "dim": None, "run": "forward", "positions": "grid", "dtype": torch.bfloat16,
    "head_dim": 64, "tensors": 2, "phase": False, "dynamic": False, "layout": "packed", "axes": 2, "norm": "none",
    "linear": None, "tokens": (7, 3), "limits": True, "groups": None,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "rotate": {},
    "cosine": {"map": "cosine"},
    "rotate backward": {"run": "backward"},
    "rotate backward omega": {"run": "backward omega"},
    "cosine silu backward omega phase": {"map": "cosine", "act": "silu", "run": "backward omega", "phase": True},
    "one tensor, float32": {"tensors": 1, "dtype": torch.float32},
    "coordinates": {"positions": "coords"},
    "masked coordinates": {"positions": "masked"},
    "an origin for each sample": {"positions": "origin"},
    "tables": {"positions": "tables"},
    "tables backward": {"positions": "tables", "run": "backward"},
    "tables for all samples and heads": {"positions": "expanded tables", "act": "silu", "run": "backward"},
    "cos and sin side by side": {"positions": "joined tables", "map": "cosine"},
    "tables computed before": {"positions": "computed tables", "norm": "rms", "run": "backward weights"},
    "tables, norm of heads": {"positions": "tables", "norm": "rms of heads"},
    "72 channels, contiguous": {"head_dim": 72, "layout": "bhnd"},
    "rows that are not at 16 bytes": {"layout": "odd"},
    "an input computed before": {"layout": "computed"},
    "formed again": {"run": "again"},
    "softmax over features": {"act": "softmax", "dim": -1, "map": "cosine"},
    "softmax over the sequence": {"act": "softmax", "dim": -2},
    "softmax over the sequence backward": {"act": "softmax", "dim": -2, "run": "backward"},
    "norm": {"norm": "rms", "head_dim": 128},
    "norm backward": {"norm": "rms", "head_dim": 128, "run": "backward"},
    "norm backward weights": {"norm": "rms", "head_dim": 128, "run": "backward weights"},
    "norm by head backward omega weights phase": {
        "norm": "layer by head",
        "map": "cosine",
        "act": "silu",
        "run": "backward omega weights",
        "phase": True,
    },
    "norm of heads": {"norm": "layer of heads"},
    "norm of heads backward weights": {"norm": "layer of heads", "run": "backward weights"},
    "norm backward weights without limits": {"norm": "rms", "run": "backward weights", "limits": False},
    "linear, one pass": {"linear": {}},
    "linear, one pass, backward omega": {"linear": {}, "run": "backward omega"},
    "linear, half of the channels, backward omega": {"linear": {"rotary_dim": 32}, "run": "backward omega"},
    "linear norm backward weights": {
        "linear": {"map": "rotate"},
        "norm": "rms",
        "tokens": (70, 30),
        "run": "backward weights",
    },
    # Gradients of a projection are joined. That of v is computed or "given". A "taken" gradient is also needed
    # elsewhere.
    "joined backward": {"run": "joined"},
    "joined backward omega weights": {"run": "joined omega weights", "norm": "rms"},
    "joined with grouped keys": {"run": "joined", "groups": 2},
    "joined with another": {"run": "joined given"},
    "joined with another omega weights": {"run": "joined given omega weights", "norm": "rms"},
    "joined with another by a launcher, weights": {"run": "joined given weights", "norm": "rms", "limits": False},
    "joined with another of grouped keys": {"run": "joined given", "groups": 2},
    "joined with another that is not at 16 bytes": {"run": "joined given", "head_dim": 36},
    "joined linear": {"run": "joined", "linear": {"map": "rotate"}},
    "joined and taken": {"run": "joined taken"},
    # Cases that Inductor leaves to the operator.
    "linear, causal": {"linear": {"is_causal": True, "normalizer": "none"}},
    "norm by head and group": {"norm": "rms by head and group"},
    "norm of rows that are not at 16 bytes": {"norm": "rms", "layout": "odd"},
    "sums of rows that are not at 16 bytes": {"run": "backward omega", "layout": "odd"},
    "any size": {"dynamic": True},
    "any size backward": {"dynamic": True, "run": "backward omega"},
    "five axes": {"axes": 5},
}


def build(case: SimpleNamespace) -> tuple[Callable[..., Any], list[Tensor]]:
    shape = (*case.tokens, 2, 2, 2)[: case.axes]
    n, d = torch.Size(shape).numel() + 1, case.head_dim
    channels = d if case.map == "cosine" else d // 2
    out = 2 * d if case.map == "cosine" else d
    tensors = [torch.empty(1, channels, case.axes), torch.empty(1, channels) if case.phase else torch.empty(1, 1)]
    tensors += [torch.empty(2, n, 3, 4, d, dtype=case.dtype), torch.empty(2, n, 4, d + 1, dtype=case.dtype)]
    tensors += [torch.empty(2, n, 4, out, dtype=case.dtype)]
    tensors += [
        torch.empty(n - 1, case.axes),
        torch.empty(2, case.axes, dtype=torch.int64),
        torch.empty(n - 1, dtype=torch.bool),
        torch.empty(2, n - 1, d),
    ]
    tensors += [torch.empty(*WEIGHTS[case.norm.partition(" ")[2]], d) for _ in range(4)]

    def f(omega, phase, qkv, odd, grad, coords, origin, rotated, tables, *weights):
        xs = list(qkv.unbind(2))[: case.tensors]
        if case.layout == "odd":
            xs = [odd[..., 1:]] * case.tensors
        elif case.layout == "bhnd":
            xs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs]
        elif case.layout == "computed":
            xs = [x.sin() for x in xs]
        xs = [x.transpose(1, 2) for x in xs]
        if case.groups is not None:
            xs[1:] = [x[:, : case.groups] for x in xs[1:]]
        positions: Any = Grid(shape, prefix=1)
        if case.positions in ("coords", "masked"):
            positions = Coordinates(coords, prefix=1, rotated=rotated if case.positions == "masked" else None)
        elif case.positions == "origin":
            positions = Grid(shape, prefix=1, origin=origin)
        elif "tables" in case.positions:
            positions, omega = make_tables(case, tables), None
        if case.linear is not None:
            return attend(case, qkv, grad, Sides(omega, positions), weights)
        options, given = make_norm(Options(case.map, case.act, case.dim), case, weights)
        call = validate(options, tuple(xs), omega, positions, phase if case.phase else None, None, given)
        if case.phase:
            call = call._replace(tables=call.tables._replace(phase=phase))
        if case.run == "forward":
            return [y * 2 for y in ENCODE.forward(call, xs, (), False)[: len(xs)]]
        if case.run == "again":
            late = grad.transpose(1, 2)
            late = late @ late.mT
            return [late @ y for y in ENCODE.forward(call, xs, (), False)[: len(xs)]]
        grads = [grad.transpose(1, 2)[:, : x.shape[1]] for x in xs]
        need = "omega" in case.run
        load = xs if need or case.act != "none" or case.norm != "none" else []
        stats = [x.new_zeros(2, *x.shape[:2], d, dtype=accumulator(x.dtype)) for x in xs if case.dim == -2]
        needs = Needs(need, need and case.phase, "weights" in case.run)
        found = ENCODE.backward(call, grads, load, stats, needs, False)
        other = grads[1] if "given" in case.run else grads[1].sin()
        return join(case, [*found[:2], other], found) if "joined" in case.run else found

    return f, tensors


def make_tables(case: SimpleNamespace, tables: Tensor) -> CallerTables:
    """Make cos and sin of all channels, for the tokens after the first."""
    if case.positions == "joined tables":
        return CallerTables(CosSin(tables.view(-1, tables.shape[-1], 2), None), 1)
    tables = tables.sin() if case.positions == "computed tables" else tables
    if case.positions == "expanded tables":
        tables = tables[:, None, None].expand(-1, 2, 4, -1, -1)
    return CallerTables(CosSin(*tables.unbind(0)), 1)


def join(case: SimpleNamespace, grads: list[Tensor], found: list[Tensor]) -> list[Tensor]:
    """Return dq, dk and dv as the gradient of a projection that another operation reads, and the other gradients."""
    joined = torch.ops.lrpe_md.join(grads, case.groups)
    taken = [grads[0] * 2] if "taken" in case.run else []
    return [joined, joined.cumsum(0), *found[2:], *taken]


WEIGHTS: dict[str, tuple[int, ...]] = {
    "": (), "by head": (4,), "of heads": (4,), "by head and group": (3, 4)
}  # fmt: skip


def make_norm(options: Any, case: SimpleNamespace, weights: Sequence[Tensor]) -> tuple[Any, Any]:
    """Return the options of a case's norm, and its weights for q and k."""
    if case.norm == "none":
        return options, Weights()
    kind, _, form = case.norm.partition(" ")
    gamma, beta = tuple(weights[:2]), tuple(weights[2:]) if kind == "layer" else None
    return take_norm(options, Norm(kind, gamma, beta, over="heads" if form == "of heads" else "head"), 2)


def attend(case: SimpleNamespace, qkv: Tensor, grad: Tensor, sides: Sides, weights: Sequence[Tensor]) -> list[Tensor]:
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    if case.linear.get("map", "cosine") == "cosine" and "rotary_dim" not in case.linear:
        sides = sides._replace(omega=torch.cat([sides.omega, sides.omega], 1))
    options, given = make_norm(LinearOptions(**case.linear), case, weights)
    operands = Operands(q, k, v)
    call = validate_linear(options, operands, sides, given)
    o, *saved = ATTEND.forward(call, operands, (False, True), False)
    if case.run == "forward":
        return [o * 2]
    needs = LinearNeeds(omega="omega" in case.run, norm="weights" in case.run)
    found = ATTEND.backward(call, [grad.transpose(1, 2)], operands, saved, needs, False)
    return join(case, found[:3], found[1:]) if "joined" in case.run else found


def main() -> None:
    describe_gpu()
    settings = config.patch(
        fx_graph_cache=False, compile_threads=1,
        joint_graph_constant_folding=False, shape_padding=False,  # these would run code on a GPU
        reorder_for_locality=False,  # only for programs without gradients
    )  # fmt: skip
    with settings, torch._functorch.config.patch(enable_autograd_cache=False):  # pyright: ignore[reportAttributeAccessIssue]
        for name in sys.argv[1:] or CASES:
            case = SimpleNamespace(**{**BASE, **CASES[name]})
            torch.compiler.reset()
            with nullcontext() if case.limits else mock.patch.object(compiled, "_takes_options", return_value=False):
                ((code, loose),) = write_code(*build(case), case.dynamic)
            body, kernels = code[code.index("def call") :], compile_kernels(code)
            row = {
                "case": name,
                "launches": re.findall(r"(fixed_\w+_kernel)(?:_launcher)?_\d+(?:\.run)?\(", body),
                "arguments": [count_arguments(a) for a in re.findall(r"fixed_\w+(?:\.run)?\((.*)\)", body)],
                "others": len(re.findall(r"triton_\w+\.run\(", body)),
                "joined": [int(n) for n in re.findall(r"triton_\w*join\w*\.run\(.*?, (\d+), stream", body)],
                "operators": re.findall(r"torch\.ops\.lrpe_md\.(\w+)", body),
                "registers": {**{name: each["registers"] for name, each in kernels.items()}, **make_launchers(code)},
                "contracted": [name for name, each in kernels.items() if each["contracted"]],
                "loose": loose._asdict(),
                "launchers": len(re.findall(r"fixed_\w+_launcher_\d+\(", body)),
                "defined": len(re.findall(r"^fixed_\w+ = async_compile", code, re.MULTILINE)),
                "by_torch": len(re.findall(r"^fixed_\w+\.heuristic_type = .*FIXED$", code, re.MULTILINE)),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
