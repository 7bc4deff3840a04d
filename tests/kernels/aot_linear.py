"""Compile linear attention's kernels ahead of time, without a GPU: ``python tests/kernels/aot_linear.py TARGET``.

Like aot.py, the script prints one JSON line per kernel, for test_aot.py. Targets other than sm_90 get few cases.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aot
import torch
import triton
from lrpe_md.scripts.common.cases import LinearCase, LinearInputs, make_linear_inputs

from lrpe_md.engine import kernels
from lrpe_md.engine.core import launching
from lrpe_md.engine.core.call import NO_WEIGHTS
from lrpe_md.engine.core.norms import take_norm
from lrpe_md.engine.linear import launch as linear_launch
from lrpe_md.engine.linear import launch_memory
from lrpe_md.engine.linear import plan as plans
from lrpe_md.engine.linear.call import LinearNeeds, LinearOptions, Operands, Sides
from lrpe_md.engine.linear.validate import validate_linear

BF16, HALF = torch.bfloat16, torch.float16
# test_aot.py checks that row sums stay in a warp, that factors of causal products are read in their stored layout, and
# that features go from memory to the matrix units.
CAUSAL = LinearCase(dtype=BF16, head_dim=64, heads=(2, 2), act="silu", mask="causal", normalizer="none")
READ = {
    "wide": LinearCase(None, dtype=BF16, head_dim=128, heads=(2, 2), act="relu"),
    "causal": CAUSAL,
    "raw": replace(CAUSAL, map=None, act="none"),
}
MEMORY = LinearCase("rotate", dtype=BF16, head_dim=112, mask="block", block=5, decay="block")
FEW = [  # cases that cover every kernel
    MEMORY,
    replace(MEMORY, rule="delta", gate="float", prefix=2, state=True),
    LinearCase("rotate", (700,), dtype=BF16, head_dim=64, mask="causal", decay="head", state=True),
    LinearCase(dtype=BF16, head_dim=64, heads=(2, 2)),
    LinearCase(dtype=BF16, head_dim=72, heads=(2, 2)),
    LinearCase("rotate", dtype=BF16, head_dim=64, mask="causal", gate="float", phase="both", act="softplus"),
    LinearCase("rotate", dtype=BF16, head_dim=128, mask="causal"),
    LinearCase(coords="by_sample", masked=True, amplitude_heads=1, act="softmax", dim=-1, layout="odd"),
    LinearCase("rotate", scale=2.0, k_shape=(2, 5), k_positions=(("scale", None), ("coords", "by_sample"))),
]
CASES = [
    *FEW,
    LinearCase(dtype=BF16, head_dim=64, mask="block", block=5, rule="delta", directions="both", normalizer="encoded"),
    LinearCase(None, mask="block", block=5, rule="delta", decay="head", normalizer="none", heads=(2, 2)),
    LinearCase("rotate", dtype=HALF, head_dim=64, rotary_dim=32, mask="block", block=5, rule="delta", norm="rms"),
    LinearCase(None, (700,), dtype=BF16, heads=(2, 2), mask="causal", decay="block", normalizer="encoded"),
    LinearCase(shape=(700,), head_dim=72, mask="causal", decay="block", gate="float"),
    LinearCase(None, dtype=BF16, head_dim=64, mask="block", block=5, normalizer="encoded", state=True),
    LinearCase("rotate", dtype=HALF, head_dim=72, rotary_dim=slice(4, 36), pairs="interleaved", phase="k", gate="bool"),
    LinearCase(mask="causal", cu_seqlens=(9, 7), batch=1, normalizer="encoded", act="sigmoid", state=True),
    LinearCase(dtype=BF16, head_dim=128, heads=(2, 2), state=True, origin="by_sample"),
    LinearCase(dtype=BF16, head_dim=64, heads=(2, 2), normalizer="encoded", mask="causal"),
    LinearCase(head_dim=64, heads=(2, 2), normalizer="encoded"),
    LinearCase("rotate", dtype=BF16, head_dim=64, norm="rms", heads=(2, 2)),
    LinearCase(
        dtype=BF16, head_dim=64, norm="layer", norm_groups=2, norm_weight="by_head", mask="causal", gate="float"
    ),
    LinearCase("rotate", norm="layer", norm_dtype=HALF, rotary_dim=10, norm_groups=3, suffix=1, mask="block", block=5),
    LinearCase(None, dtype=HALF, head_dim=72, norm="rms", norm_weight="none", act="softmax", dim=-1, mask="causal"),
    LinearCase(dtype=BF16, head_dim=72, rotary_dim=slice(8, 40), norm="layer", act="softmax", dim=-1, mask="causal"),
    LinearCase(dtype=BF16, head_dim=64, rotary_dim=32, normalizer="encoded", gate="float", state=True),
]


def record(inputs: LinearInputs, one_pass: bool) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return the kernels that the launcher runs for a case, forward and backward."""
    case = inputs.case
    phases = (None, inputs.phase) if case.phase == "k" else inputs.phase
    options = LinearOptions(
        case.map, case.act, case.dim, case.pairs, case.rotary_dim, case.order, case.normalizer, case.mask == "causal",
        case.block or None, case.eps, case.return_state, "triton", rule=case.rule, directions=case.directions,
    )  # fmt: skip
    q, k, v = inputs.qkv
    state = tuple(inputs.state)
    operands, weights = Operands(q, k, v, inputs.gate, state, inputs.decay), NO_WEIGHTS
    norm = inputs.norm()
    if norm is not None:
        options, weights = take_norm(options, norm, 2)
    sides = Sides(inputs.omega, inputs.positions, phases, inputs.amplitude, inputs.cu_seqlens)
    call = validate_linear(options, operands, sides, weights)
    mapped = case.map is not None
    needs = LinearNeeds(
        case.gate == "float", mapped, False, mapped and case.phase != "none", bool(inputs.weights), case.state,
        inputs.decay is not None,
    )  # fmt: skip
    launcher: Any = launch_memory if call.attention.forgets else linear_launch
    names = [name for name in kernels.__all__ if name.startswith("linear")]
    saved = {name: getattr(kernels, name) for name in names}
    recorders = {name: aot.Recorder(fn) for name, fn in saved.items()}
    reduce, linear_launch.reduce_partial = linear_launch.reduce_partial, lambda *args: []
    reduce_weights, linear_launch.reduce_weights = linear_launch.reduce_weights, lambda *args: []
    longest, plans.ONE_PASS = plans.ONE_PASS, 10**6 if one_pass else 0
    try:
        for name, recorder in recorders.items():
            setattr(kernels, name, recorder)
        launcher.forward(call, operands, case.return_state, False)
        launcher.backward(call, [inputs.grad], operands, [], needs)
    finally:
        linear_launch.reduce_partial, plans.ONE_PASS = reduce, longest
        linear_launch.reduce_weights = reduce_weights
        for name, fn in saved.items():
            setattr(kernels, name, fn)
    return [source for recorder in recorders.values() for source in recorder.sources()]


def main() -> None:
    target = aot.TARGETS[sys.argv[1]]
    launching.INTERPRETING = False
    on_cuda = target.backend == "cuda"
    has_ptx = launching.has_ptx
    launching.has_ptx = lambda dtype: on_cuda and dtype != torch.float64
    launching._can_launch_early = lambda: target.arch == 90
    launching.limit_registers = lambda most: {"maxnreg": most} if on_cuda and most else {}
    unique: dict[str, Any] = {}
    cases = {str(i): case for i, case in enumerate(CASES if target.arch == 90 else FEW)}
    for label, case in {**cases, **(READ if target.arch == 90 else {})}.items():
        for one_pass in (False,) if label in READ else (True, False):
            for name, source, options in record(make_linear_inputs(case), one_pass):
                unique.setdefault(source.hash() + str(options), (name, source, options, case, label))
    launching.has_ptx = has_ptx
    for name, source, options, case, label in unique.values():
        begin, error, shared, asm = time.perf_counter(), None, 0, {}
        try:
            compiled = triton.compile(source, target=target, options=options)
            shared, asm = compiled.metadata.shared, compiled.asm
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        ptx = asm.get("ptx", "")
        row = SimpleNamespace(
            kernel=name, case=str(case), label=label, error=error, shared=shared, shuffles=ptx.count("shfl.sync"),
            loads={kind: ptx.count(f"ld.shared.{kind}") for kind in ("b16", "v2.b32", "v4.b32")},
            seconds=round(time.perf_counter() - begin, 2), contracted=aot.count_contracted(asm),
            early=aot.find_early(ptx),
        )  # fmt: skip
        print(json.dumps(vars(row)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
