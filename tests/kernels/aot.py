"""Compile the kernels ahead of time, without a GPU: ``python tests/kernels/aot.py TARGET [--part I/N]``.

The script calls the launcher on meta tensors and compiles the kernels that it would launch. The cases cover every pair
of values of the options on which a compiled kernel depends. It prints one JSON line per kernel, for test_aot.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

assert "TRITON_INTERPRET" not in os.environ, "compiling needs triton without its interpreter"

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lrpe_md import Coordinates, Grid, Norm
from lrpe_md.checks import rotary_slice
from lrpe_md.engine.core import call as calls
from lrpe_md.engine.core import launching, reduction
from lrpe_md.engine.core.call import CallerTables
from lrpe_md.engine.core.memory import accumulator
from lrpe_md.engine.core.norms import take_norm
from lrpe_md.engine.core.operator import call_cache
from lrpe_md.engine.encode import heads as launch_heads
from lrpe_md.engine.encode import launch
from lrpe_md.engine.encode import plan as plans
from lrpe_md.engine.encode.validate import validate
from lrpe_md.reference import ACTIVATIONS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip
AXES: dict[str, list[Any]] = {
    "map": ["cosine", "half", "interleaved", "blocks"],
    "order": ["cos_sin", "sin_cos"],
    "act": [
        name if dim is None else f"{name} {dim}" for name, act in ACTIVATIONS.items() for dim in act.dims or (None,)
    ],
    "run": ["forward", "backward", "backward omega"],
    "positions": ["grid", "affine", "coords", "integer coords by sample", "masked coords by sample"],
    "axes": [1, 2, 3, 4],
    "dtype": [torch.bfloat16, torch.float16, torch.float32, torch.float64],
    "head_dim": [64, 72, 20],
    "rotary": ["all", "first", "slice"],
    "tensors": [2, 1],
    "phase": [False, True],
    "amplitude": [False, True],
    "omega": [torch.float32, torch.float64],
    "tables": ["none", "pairs float32", "full bfloat16", "complex float64", "full float16 odd", "stored"],
    "long": [False, True],
    "norm": ["none", "rms", "layer by head", "rms of groups", "layer of heads"],
}


def possible(case: dict[str, Any]) -> bool:
    """Return whether a (partial) case exists."""
    if case.get("map") == "cosine" and case.get("rotary", "all") != "all":
        return False
    if case.get("order") == "sin_cos" and (case.get("map", "cosine") != "cosine" or case.get("rotary", "all") != "all"):
        return False
    if case.get("norm", "none") != "none" and case.get("act") == "softmax -2":
        return False
    if case.get("tables", "none") in ("none", "stored"):
        # Stored angles are only possible with a grid or with coordinates shared by the batch.
        stored = case.get("tables") == "stored"
        return not (stored and (case.get("norm", "none") != "none" or "by sample" in case.get("positions", "")))
    # With the caller's tables, frequencies aren't learned, but a norm may have learned weights.
    learns = case.get("run") == "backward omega" and (case.get("norm") == "none" or case.get("act") == "softmax -2")
    return not (case.get("phase") or case.get("amplitude") or learns or case.get("omega") == torch.float64)


def cases() -> list[SimpleNamespace]:
    """Return cases that cover every possible pair of values.

    The search is greedy: it takes the best of several random completions of an uncovered pair.
    """
    rng, names = random.Random(0), list(AXES)
    first = {name: values[0] for name, values in AXES.items()}
    found = [SimpleNamespace(**first), SimpleNamespace(**{**first, "map": "half", "run": "backward"})]
    missing = all_pairs()
    for case in found:
        missing -= {frozenset(pair) for pair in itertools.combinations(vars(case).items(), 2)}
    while missing:
        best, gain = {}, 0
        pairs = sorted(missing, key=lambda pair: sorted(map(str, pair)))
        for _ in range(60):
            case = dict(rng.choice(pairs))
            for name in rng.sample(names, len(names)):
                if name not in case:
                    values = [v for v in AXES[name] if possible({**case, name: v})]
                    case[name] = max(
                        rng.sample(values, len(values)),
                        key=lambda v: sum(frozenset([(name, v), item]) in missing for item in case.items()),
                    )
            covered = sum(frozenset(pair) in missing for pair in itertools.combinations(case.items(), 2))
            if covered > gain:
                best, gain = case, covered
        missing -= {frozenset(pair) for pair in itertools.combinations(best.items(), 2)}
        found.append(SimpleNamespace(**{name: best[name] for name in names}))
    # Grids with an origin are not among the options, because they share most code with scaled grids.
    found.append(SimpleNamespace(**{**first, "map": "half", "axes": 1, "positions": "origin by sample"}))
    wide = {"run": "backward omega", "axes": 3, "positions": "origin", "head_dim": 128}
    found.append(SimpleNamespace(**{**first, **wide}))
    for norm, run in itertools.product(("rms", "layer of heads"), AXES["run"]):  # combinations in models with qk-norm
        changes = {"map": "interleaved", "axes": 3, "head_dim": 128, "norm": norm, "run": run}
        found.append(SimpleNamespace(**{**first, **changes}))
    for start, change in (  # output offsets on the device, which don't interact with anything else
        ("k", {"map": "half", "head_dim": 128, "rotary": "first", "positions": "origin by sample"}),
        ("both by sample", {"map": "interleaved", "head_dim": 20, "norm": "rms", "long": True}),
        ("k by sample", {"map": "cosine", "tensors": 1, "dtype": torch.float32}),
    ):
        found.append(SimpleNamespace(**{**first, **change, "start": start}))
    return found


def all_pairs() -> set[frozenset]:
    return {
        frozenset([(a, x), (b, y)])
        for (a, xs), (b, ys) in itertools.combinations(AXES.items(), 2)
        for x, y in itertools.product(xs, ys)
        if possible({a: x, b: y})
    }


def uncovered() -> list[str]:
    """Return the pairs of values that no case covers."""
    rows = [set(vars(case).items()) for case in cases()]
    return [str(set(pair)) for pair in all_pairs() if not any(pair <= row for row in rows)]


def describe(value: Any, path: tuple[int, ...], constexprs: dict[tuple[int, ...], Any]) -> Any:
    """Return the type of a launch argument that is not a number.

    Numbers in tuples are packed (signature.py).
    """
    if value is None:
        constexprs[path] = None
        return "constexpr"
    if isinstance(value, tuple):
        return tuple(describe(each, (*path, i), constexprs) for i, each in enumerate(value))
    if isinstance(value, torch.Tensor):
        return "*" + DTYPES[value.dtype]
    assert value % 16 not in (0, 1), f"{value} would be compiled into the kernel"
    return "i64" if abs(value) >= 2**31 else "i32"


class Recorder:
    """Stand-in for a kernel that records its launches."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.calls = fn, []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))

    def sources(self) -> list[tuple[str, ASTSource, dict[str, Any]]]:
        found = []
        for args, kwargs in self.calls:
            options = {
                k: v for k, v in kwargs.items() if k in ("num_warps", "maxnreg", "launch_pdl", "enable_fp_fusion")
            }
            values = dict(zip(self.fn.arg_names, args, strict=False))
            values |= {k: v for k, v in kwargs.items() if k not in options}
            signature, constexprs = {}, {}
            for i, param in enumerate(self.fn.params):
                value = values[param.name]
                if param.is_constexpr:
                    signature[param.name], constexprs[(i,)] = "constexpr", value
                elif isinstance(value, (int, float)):
                    assert param.do_not_specialize, f"{param.name} would be compiled into the kernel"
                    signature[param.name] = param.annotation_type
                else:
                    signature[param.name] = describe(value, (i,), constexprs)
            found.append((self.fn.__name__, ASTSource(self.fn, signature, constexprs), options))
        return found


def record(case: SimpleNamespace) -> list[tuple[str, ASTSource, dict[str, Any]]]:
    """Return the kernels that the launcher runs for a case."""
    names = ("lrpe_kernel", "reduce_partial_kernel", "softmax_sequence_kernel")
    places = {**dict.fromkeys(names, launch), "reduce_partial_kernel": reduction, "heads_kernel": launch_heads}
    saved = {name: getattr(module, name) for name, module in places.items()}
    recorders = {name: Recorder(fn) for name, fn in saved.items()}
    has_ptx, launching.has_ptx = launching.has_ptx, lambda dtype: has_ptx(dtype) and case.cuda
    registers = launching.limit_registers
    launching.limit_registers = lambda most: registers(most) if case.cuda else {}
    early, launching._can_launch_early = launching._can_launch_early, lambda: case.early
    call_cache.clear()
    try:
        for name, recorder in recorders.items():
            setattr(places[name], name, recorder)
        call(case)
    finally:
        launching.has_ptx, launching.limit_registers, launching._can_launch_early = has_ptx, registers, early
        call_cache.clear()
        for name, fn in saved.items():
            setattr(places[name], name, fn)
    return [source for recorder in recorders.values() for source in recorder.sources()]


def call(case: SimpleNamespace) -> None:
    shape = (2, 3, 2, 2)[: case.axes]
    num_tokens = torch.Size(shape).numel() + 1
    xs = [torch.randn(2, heads, num_tokens, case.head_dim, dtype=case.dtype) for heads in (4, 2)[: case.tensors]]
    if case.long:
        step = 2**31
        xs = [torch.empty_strided(x.shape, (8, 8, step, 1), dtype=x.dtype) for x in xs]
    heads = xs[-1].shape[1]
    if "origin" in case.positions:
        size = (2, case.axes) if "sample" in case.positions else (case.axes,)
        positions = Grid(shape, prefix=1, origin=torch.zeros(size, dtype=torch.int64))
    elif case.positions in ("grid", "affine"):
        positions = Grid(shape, prefix=1, scale=0.5 if case.positions == "affine" else None)
    else:
        coords = torch.randn(*((2,) if "sample" in case.positions else ()), num_tokens - 1, case.axes)
        rotated = torch.ones(coords.shape[:-1], dtype=torch.bool) if "masked" in case.positions else None
        positions = Coordinates(coords.long() if "integer" in case.positions else coords, prefix=1, rotated=rotated)
    rotary = {"all": None, "first": 16, "slice": slice(4, 16)}[case.rotary]
    width = case.head_dim if case.map == "cosine" else rotary_slice(rotary, case.head_dim)[1]
    channels = width if case.map == "cosine" else width // 2
    # Per-head frequencies with a norm over all heads need two launches.
    omega = torch.randn(1 if "of heads" in case.norm else heads, channels, case.axes, dtype=case.omega)
    phase = torch.randn(1, channels) if case.phase else None
    act, _, dim = case.act.partition(" ")
    amplitude = torch.randn(heads, channels) if case.amplitude else None
    pairs = {"cosine": "half", "blocks": (channels - 2, 2)}.get(case.map, case.map)
    name = "cosine" if case.map == "cosine" else "rotate"
    options = calls.Options(name, act, int(dim) if dim else None, pairs, rotary, case.order)
    options, weights = make_norm(options, case, xs)
    given = case.tables not in ("none", "stored")
    if given:
        positions = make_tables(case, (channels, heads, num_tokens - 1))
    launcher = launch_heads if "of heads" in case.norm else launch
    checked = validate(options, tuple(xs), omega, positions, phase, amplitude, weights)
    if case.tables == "stored":
        table = torch.randn(1, omega.shape[0], num_tokens - 1, channels)
        checked = checked._replace(cos_sin=calls.CosSin(table, table))
    if case.run == "forward":
        launcher.forward(checked, xs, *make_outputs(case, checked, xs))
        return
    grads = [torch.randn(*x.shape[:3], checked.spec.out_dim(case.head_dim), dtype=case.dtype) for x in xs]
    stats = [torch.zeros(2, *x.shape[:2], case.head_dim, dtype=accumulator(case.dtype)) for x in xs]
    need = case.run == "backward omega"
    learned = need and case.norm != "none"
    launcher.backward(checked, grads, xs, stats, calls.Needs(need and not given, need and case.phase, learned))


def make_tables(case: SimpleNamespace, sizes: tuple[int, int, int]) -> CallerTables:
    """Make the tables of a case with these channels, heads and rows. They are per sample if its positions are."""
    channels, heads, rows = sizes
    kind, dtype, *odd = case.tables.split()
    width = 2 * channels if kind == "full" and case.map != "cosine" else channels
    size = (2 if "by sample" in case.positions else 1, heads, rows, width + len(odd))
    cos, sin = (torch.randn(*size, dtype=getattr(torch, dtype))[..., :width] for _ in range(2))
    if case.long:
        cos = torch.empty_strided(cos.shape, (8, 8, 2**31, 1), dtype=cos.dtype)
    cos_sin = calls.CosSin(torch.stack([cos, sin], -1), None) if kind == "complex" else calls.CosSin(cos, sin)
    return CallerTables(cos_sin._replace(inverse=case.order == "sin_cos"), 1)


def make_outputs(case: SimpleNamespace, checked: calls.Call, xs: list) -> tuple[Any, ...]:
    """Make output caches for k or both, and their offsets."""
    kind = getattr(case, "start", "")
    if not kind:
        return ()
    width = checked.spec.out_dim(case.head_dim)
    outs: list[Any] = [torch.empty(2, x.shape[1], 4096, width, dtype=case.dtype) for x in xs]
    if len(xs) == 2 and not kind.startswith("both"):
        outs[0] = None
    return outs, torch.zeros(2 if "sample" in kind else 1, dtype=torch.int64)


def make_norm(options: calls.Options, case: SimpleNamespace, xs: list) -> tuple[calls.Options, calls.Weights]:
    """Return the options of a case's norm, and its weights for q and k."""
    if case.norm == "none":
        return options, calls.Weights()
    kind, _, form = case.norm.partition(" ")

    def weights() -> Any:
        sizes = {"": [], "by head": [[x.shape[1]] for x in xs], "of heads": [[x.shape[1]] for x in xs]}
        sizes = sizes.get(form) or [[3, 1] if form == "of groups" else []] * len(xs)
        found = tuple(torch.randn(*size, case.head_dim, dtype=torch.float32) for size in sizes)
        return found if len(xs) == 2 else found[0]

    bias = weights() if kind == "layer" else None
    norm = Norm(kind, weights(), bias, over="heads" if form == "of heads" else "head", offset=float(kind == "rms"))
    return take_norm(options, norm, len(xs))


ZEROS = {"0f00000000", "0f80000000"}


def findings(asm: dict[str, Any]) -> dict[str, Any]:
    """Collect properties of a kernel's code, from PTX unless noted.

    remainders: products s·w whose whole turns are removed by fma(s, w, n), with -n whole. counted_twice: those of them
    whose rounding error fma(s, w, -s·w) is added as well, which happens if the compiler contracts p - round(p).
    counted: whether turns are counted in integers, of 2^-32. narrow: loads and stores of a single 16-bit element.
    early: work before the wait for the previous kernel. split: loads before and after the first barrier. contracted:
    products that the compiler fused into sums.
    """
    ptx, definitions = asm.get("ptx", ""), {}
    for line in ptx.splitlines():
        if found := re.match(r"\s*(\S+)\s+(%\w+), (.*);", line):
            definitions[found[2]] = (found[1].replace(".rn", ""), [operand.strip() for operand in found[3].split(",")])

    def constant(value: str) -> str:
        op, operands = definitions.get(value, ("mov", [value]))
        return operands[0] if op.startswith("mov") else value

    def is_zero(value: str) -> bool:
        return constant(value) in ZEROS

    def unsigned(value: str) -> str:
        op, operands = definitions.get(value, ("", [value]))
        return operands[-1] if op == "neg.f32" or (op == "sub.f32" and is_zero(operands[0])) else value

    exact, residues = set(), set()
    for op, operands in definitions.values():
        if op != "fma.f32" or is_zero(operands[2]):
            continue
        *factors, addend = operands
        op, operands = definitions.get(addend, ("", []))
        less = op == "sub.f32" and constant(operands[0]) == "0f4B400000"  # subtracts from 1.5 · 2^23
        if less or op.startswith("cvt.rpi"):  # ceil
            exact.add(tuple(sorted(factors)))
            continue
        value = unsigned(addend)
        op, operands = definitions.get(value, ("", []))
        product = op.startswith("mul") or (op == "fma.f32" and is_zero(operands[2]))
        if product and sorted(map(unsigned, operands[:2])) == sorted(factors):
            residues.add(tuple(sorted(factors)))
    narrow = len(re.findall(r"(?:ld|st)\.global\.b16", ptx))
    counted = "0f2F800000" in ptx  # 2^-32
    twice = len(exact & residues)
    split = [part.count("ld.global") for part in ptx.partition("bar.sync")[::2]]
    found = {"counted_twice": twice, "counted": counted, "narrow": narrow, "early": find_early(ptx), "split": split}
    return {"remainders": len(exact), **found, "contracted": count_contracted(asm)}


def find_early(ptx: str) -> list[str]:
    """Return the instructions that let the next kernel start before this one ends, or wait for the previous kernel."""
    return sorted(set(re.findall(r"griddepcontrol\.(\w+)", ptx)))


def count_contracted(asm: dict[str, Any]) -> int:
    """Count multiply-adds in PTX that the kernel's source doesn't contain. gfx942 has no PTX."""
    written = re.findall(r"call (<\d+ x )?\w+>? @llvm\.(?:nvvm\.)?(?:fma|fmuladd)\b", asm.get("llir", ""))
    explicit = sum(int(size[1:-3]) if size else 1 for size in written)
    return max(0, len(re.findall(r"\bfma\.r", asm.get("ptx", ""))) - explicit)


@triton.jit
def contracts_products(p_s, p_w, p_out):
    """Example of code that is only correct if the compiler doesn't contract products."""
    o = tl.arange(0, 128)
    s, w = tl.load(p_s + o), tl.load(p_w + o)
    product = s * w
    tl.store(p_out + o, (product + tl.ceil(-0.5 - product)) + tl.fma(s, w, -product))
    tl.store(p_out + 128 + o, s * s + w * w)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=[*TARGETS, "wrong", "coverage"])
    parser.add_argument("--part", default="0/1")
    args = parser.parse_args()
    if args.target == "wrong":
        signature = dict.fromkeys(("p_s", "p_w", "p_out"), "*fp32")
        kernel = triton.compile(ASTSource(contracts_products, signature, {}), target=TARGETS["sm_90"])
        print(json.dumps(findings(kernel.asm)))
        return
    if args.target == "coverage":
        print(json.dumps(uncovered()))
        return
    target = TARGETS[args.target]
    torch.set_default_device("meta")
    launching.INTERPRETING = False
    unique: dict[str, tuple[str, ASTSource, dict[str, Any], SimpleNamespace]] = {}
    for case in cases():
        case.cuda, case.early = target.backend == "cuda", target.arch == 90
        for name, source, options in record(case):
            unique.setdefault(source.hash() + str(options), (name, source, options, case))
    index, parts = map(int, args.part.split("/"))
    work = list(unique.values())[index::parts]
    for name, source, options, case in work:
        begin = time.perf_counter()
        error, asm, resident = None, {}, 0
        names = source.fn.arg_names
        variant = source.constants[names.index("V"),]
        rows_first, sums = variant.rows_first, variant.need_dangles or variant.need_dweight
        try:
            kernel = triton.compile(source, target=target, options=options)
            asm = kernel.asm
            if "maxnreg" in options:
                programs = plans.REGISTERS // (32 * options["num_warps"] * options["maxnreg"])
                resident = programs * (kernel.metadata.shared + 1024)  # CUDA reserves 1 KiB per program
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        row = {"kernel": name, "case": {k: str(v) for k, v in vars(case).items()}, "error": error, "resident": resident,
               "rows_first": rows_first, "sums": sums, "seconds": round(time.perf_counter() - begin, 2),
               **findings(asm)}  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
