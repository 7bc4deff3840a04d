"""Adapters that let ``scripts.bench linear`` time other libraries' linear attention.

    PYTHONPATH=.:PEERS lrpe-md bench linear      PEERS: a folder with any of fla/, flash_bla/ and diffusers/

fla (flash-linear-attention) is causal, and has neither positions nor a normaliser. flash_bla
(flash-bidirectional-linear-attention) attends to all tokens, and has no positions. Both libraries expect features,
which are computed before timing in the memory layout that the library prefers. lrpe-md's times include the activation.

diffusers contains the attention module of SANA-Video. The module's own processor is compared with a processor that
calls lrpe-md. "sana" is timed from q, k and v to the heads' outputs, and "sana-module" includes norms and projections.
SanaWM applies the delta rule over frames in float32, and is timed from q, k and v to the heads' outputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lrpe_md import Grid, Norm, linear_attention, preset
from lrpe_md.reference import activate

from ..common.cases import LinearCase
from .linear_measure import BF16, BIDIRECTIONAL, TURNS, Attend, Inputs, Run, make_inputs, make_pass, shrink
from .measure import describe_error

ERROR = 1e-2  # largest relative RMS error for which a peer's function counts as the same
THREADS = 12


@dataclass(frozen=True)
class Peer:
    """Implementation from another library.

    Args:
        module, name: function to import.
        takes: function that returns whether the peer supports a workload.
        prepare: function that converts the inputs to the peer's layout.
        attend: wrapper that calls the function with the prepared inputs.
        restore: function that converts the peer's output to (B, H, N, D).
        note: remark about the peer's times, which is written to the CSV.
        compile: function (module, inputs) that compiles the kernels before timing.
    """

    module: str
    name: str
    takes: Callable[[str, LinearCase], bool]
    prepare: Callable[[Inputs], Inputs]
    attend: Callable[[Any], Attend]
    restore: Callable[[Tensor], Tensor] = lambda o: o
    note: str = "features formed beforehand"
    compile: Callable[[Any, Inputs], None] = lambda module, inputs: None

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


def as_features(inputs: Inputs) -> Inputs:
    q, k = (activate(x, inputs.case.act).to(x.dtype).contiguous() for x in (inputs.q, inputs.k))
    return replace(inputs, q=q, k=k, v=inputs.v.contiguous(), do=inputs.do.contiguous())


def tokens_first(inputs: Inputs) -> Inputs:
    """Convert the inputs to (B, N, H, D)."""
    ready = as_features(inputs)
    q, k, v, do = (x.transpose(1, 2).contiguous() for x in (ready.q, ready.k, ready.v, ready.do))
    return replace(ready, q=q, k=k, v=v, do=do)


def causal(function: Any) -> Attend:
    return lambda inputs, q, k, v, omega: function(q, k, v, scale=1.0, normalize=False)[0]


def bidirectional(function: Any) -> Attend:
    return lambda inputs, q, k, v, omega: function(q, k, v)


def takes_causal(name: str, case: LinearCase) -> bool:
    return case.map is None and case.mask == "causal" and case.normalizer == case.decay == "none"


def takes_bidirectional(name: str, case: LinearCase) -> bool:
    return case.map is None and name in BIDIRECTIONAL


def compile_bidirectional(module: Any, inputs: Inputs) -> None:
    """Compile all of the autotuner's candidates in parallel. One by one, they would take minutes per sequence length.

    If a candidate fails here, the autotuner compiles it again.
    """
    from triton.testing import do_bench

    length, width = inputs.q.shape[-2:]
    rows, state = (length * width, width, 1), (width * width, width, 1)  # strides
    sizes: dict[str, Any] = {"L": length, "DK": width, "DV": width, "grid": (1,)}
    float32, half = torch.float32, inputs.q.dtype
    calls = {
        "fused_fwd_kernel_s_km": (half, half, float32, float32, *rows, *rows, *state, width, 1.0 / length),
        "fused_fwd_kernel_o": (half, half, half, half, *rows, *rows, *state, width, 1e-6),
    }
    with ThreadPoolExecutor(THREADS) as pool:
        for name, arguments in calls.items():
            tuner: Any = getattr(module, name, None)
            for config in getattr(tuner, "configs", ()):
                pool.submit(tuner.fn.warmup, *arguments, **sizes, **config.all_kwargs())
            if tuner is not None:
                tuner.cache.clear()  # the cache key contains only the length
                tuner.do_bench = partial(do_bench, warmup=5, rep=20)  # milliseconds per configuration


def takes_frames(name: str, case: LinearCase) -> bool:
    return case.map == "rotate" and case.rule == "delta"


def prepare_frames(inputs: Inputs) -> Inputs:
    """Compute SanaWM's angles. For bidirectional attention, unscale the keys, because SanaWM's module scales them."""
    case, omega = inputs.case, inputs.omega
    assert omega is not None
    angles = inputs.positions.coordinates().to(omega) @ omega[0].T
    memory = {**inputs.memory, "angles": torch.polar(torch.ones_like(angles), angles)[None, None]}
    return replace(inputs, k=inputs.k / case.key_scale if case.directions == "both" else inputs.k, memory=memory)


def delta(_: Any, compiles: bool = False) -> Attend:
    """Return SanaWM's attention, from q, k and v to the heads' outputs. The angles are computed beforehand."""
    sana: Any = importlib.import_module(SANA_WM)

    def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, decay: Tensor, angles: Tensor, both: bool) -> Tensor:
        num_frames = decay.shape[2]
        beta, q, k = gate.unflatten(2, (num_frames, -1)), q.relu(), k.relu()
        if both:
            core = sana.SanaWMBidirectionalGDNAttention(eps=EPS)
            qkv = (x.transpose(1, 2) for x in (q, k, v))
            o = core(*qkv, beta, decay, torch.zeros(1, device=q.device), num_frames, rotary_emb=angles)
            return o.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
        q, k, v = (x.mT.float() for x in (q, k, v))
        rotated = [sana._apply_rotary_emb(x, angles) for x in (q, k)]
        return sana.torch_chunk_sana_gdn(q, k, v, *rotated, beta, decay, eps=EPS).mT.to(BF16)

    run = torch.compile(attend) if compiles else attend

    def call(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, omega: Tensor | None) -> Tensor:
        memory = inputs.memory
        return run(q, k, v, memory["gate"], memory["decay"], memory["angles"], memory["directions"] == "both")

    return call


SANA_WM, EPS = "diffusers.models.transformers.transformer_sana_wm", 1e-6
SCAN = "torch_chunk_sana_gdn"
FLA = "fla.ops.linear_attn"
FLASH_BLA = "flash_bla.ops.linear_attn.fused"
PEERS = {
    "fla fused_chunk": Peer(
        FLA, "fused_chunk_linear_attn", takes_causal, tokens_first, causal, lambda o: o.transpose(1, 2)
    ),
    "fla chunk": Peer(FLA, "chunk_linear_attn", takes_causal, tokens_first, causal, lambda o: o.transpose(1, 2)),
    "flash_bla": Peer(
        FLASH_BLA, "linear_attention", takes_bidirectional, as_features, bidirectional, compile=compile_bidirectional
    ),
    "SanaWM": Peer(SANA_WM, SCAN, takes_frames, prepare_frames, delta, note="angles formed beforehand"),
    "SanaWM, compiled": Peer(
        SANA_WM,
        SCAN,
        lambda name, case: takes_frames(name, case) and not name.endswith("long"),
        prepare_frames,
        partial(delta, compiles=True),
        note="angles formed beforehand",
    ),
}


def exact(inputs: Inputs) -> Tensor:
    """Compute the result for the first two heads of the first sample in float64."""
    q, k, v = (x[:1, :2].double() for x in (inputs.q, inputs.k, inputs.v))
    options: dict[str, Any] = {
        name: x[:1, :2].double() if isinstance(x, Tensor) else x for name, x in inputs.options.items()
    }
    positions = inputs.positions if inputs.case.has_positions else None
    return linear_attention(
        q, k, v, map=inputs.case.map, omega=inputs.omega, positions=positions, impl="reference", **options
    )  # fmt: skip


def relative_error(o: Tensor, wanted: Tensor) -> float:
    return ((o.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()).item()


def measure_peer(run: Run, name: str, case: LinearCase, impl: str, key: dict[str, Any]) -> None:
    """Check a peer's result, and time the forward and backward passes if the result is correct."""
    peer = PEERS[impl]
    function = peer.load()
    plain = make_inputs(case, run.device)
    turns = [peer.prepare(plain), *(peer.prepare(make_inputs(case, run.device)) for _ in range(TURNS - 1))]
    peer.compile(importlib.import_module(peer.module), turns[0])
    attend = peer.attend(function)
    found = peer.restore(make_pass("forward", attend, turns[0])())
    error = relative_error(found[:1, :2], exact(plain))
    if not error <= ERROR:
        run.add(**{**key, "pass": ""}, note=f"outside the budget: relative error {error:.2g}")
        return
    for which in ("forward", "backward"):
        fns = [make_pass(which, attend, each) for each in turns]
        run.time(plain, which, fns, **key, note=f"{peer.note}; relative error {error:.2g}")


# --- SANA-Video ------------------------------------------------------------------------------------------------------

SANA = LinearCase(
    map="rotate", shape=(21, 30, 52), prefix=0, batch=1, heads=(20, 20), head_dim=112, dtype=BF16
)  # fmt: skip
SANA_WORKLOADS = ("sana", "sana-module")
STOCK = "diffusers"
SANA_MODULE = "diffusers.models.transformers.transformer_sana_video"


class LinearProcessor:
    """Drop-in replacement for diffusers' ``SanaLinearAttnProcessor3_0`` that calls ``linear_attention``."""

    def __init__(self, shape: tuple[int, int, int], head_dim: int, device: torch.device) -> None:
        wan = preset("wan", head_dim=head_dim)
        self.omega, self.positions = wan.omega.to(device, torch.float32), Grid(shape)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (q, k, v))
        norm = None
        if attn.norm_q is not None:
            weights = tuple(each.weight.view(attn.heads, -1) for each in (attn.norm_q, attn.norm_k))
            norm = Norm("rms", weight=weights, eps=attn.norm_q.eps, over="heads")
        o = linear_attention(
            q, k, v, map="rotate", omega=self.omega, positions=self.positions, act="relu", pairs="interleaved",
            norm=norm,
        )  # fmt: skip
        return attn.to_out[1](attn.to_out[0](o.transpose(1, 2).flatten(2)))


class Core(nn.Module):
    """Attention module without parameters, which computes the heads' outputs from q, k and v (B, N, H·D)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, processor: Any, rotary: Any) -> Tensor:
        given: Any = SimpleNamespace(
            heads=self.heads, norm_q=None, norm_k=None, to_q=lambda x: q, to_k=lambda x: k, to_v=lambda x: v,
            to_out=(nn.Identity(), nn.Identity()),
        )  # fmt: skip
        return processor(given, q, rotary_emb=rotary)


class Whole(nn.Module):
    """SANA-Video's self-attention, including the blocks' default norms and projections."""

    def __init__(self, sana: Any, heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention = sana.Attention(
            query_dim=heads * head_dim, heads=heads, dim_head=head_dim, kv_heads=heads, bias=False,
            qk_norm="rms_norm_across_heads", cross_attention_dim=None, processor=sana.SanaLinearAttnProcessor3_0(),
        )  # fmt: skip

    def forward(self, x: Tensor, processor: Any, rotary: Any) -> Tensor:
        return processor(self.attention, x, rotary_emb=rotary)


@dataclass
class Block:
    """Workload from diffusers: a module, copies of the module's inputs, and the positions for both implementations."""

    module: nn.Module
    turns: list[tuple[Tensor, ...]]
    processors: dict[str, Any]
    rotary: tuple[Tensor, Tensor]
    do: Tensor

    def forward(self, impl: str, xs: tuple[Tensor, ...]) -> Tensor:
        return self.module(*xs, self.processors[impl], self.rotary)

    def widened(self) -> Block:
        """Return a copy in float32."""
        turns = [tuple(x.float() for x in self.turns[0])]
        return replace(self, module=deepcopy(self.module).float(), turns=turns)

    def make_pass(self, impl: str, which: str, xs: tuple[Tensor, ...]) -> Callable[[], Any]:
        if which == "forward":

            def forward() -> Tensor:
                with torch.no_grad():
                    return self.forward(impl, xs)

            return forward
        leaves = tuple(x.detach().requires_grad_() for x in xs)
        o, wanted = self.forward(impl, leaves), [*leaves, *self.module.parameters()]
        return lambda: torch.autograd.grad(o, wanted, self.do, retain_graph=True)


def make_block(name: str, ours: str, case: LinearCase, device: torch.device) -> Block:
    """Build a workload. ``ours`` is the name of lrpe-md's implementation."""
    sana: Any = importlib.import_module(SANA_MODULE)
    heads, head_dim, shape = case.heads[0], case.head_dim, case.shape
    torch.manual_seed(0)
    module = Core(heads) if name == "sana" else Whole(sana, heads, head_dim)
    module = module.to(device, case.dtype)
    num = 3 if name == "sana" else 1
    size = (case.batch, shape[0] * shape[1] * shape[2], heads * head_dim)
    turns = [tuple(torch.randn(size, device=device, dtype=case.dtype) for _ in range(num)) for _ in range(TURNS)]
    rope = sana.WanRotaryPosEmbed(head_dim, (1, 2, 2), 1024)
    rotary = rope(torch.empty(1, 16, shape[0], 2 * shape[1], 2 * shape[2]))
    processors = {STOCK: sana.SanaLinearAttnProcessor3_0(), ours: LinearProcessor(shape, head_dim, device)}  # pyright: ignore
    tables: Any = tuple(t.to(device) for t in rotary)
    return Block(module, turns, processors, tables, torch.randn(size, device=device, dtype=case.dtype))


def measure_sana(run: Run, name: str, impl: str, ours: str, smoke: bool) -> None:
    """Time lrpe-md or the stock processor, and check that lrpe-md is as close to float32 as the stock processor."""
    case = replace(shrink(SANA), head_dim=24) if smoke else SANA
    key = {
        "workload": name, "map": "rotate", "act": "relu", "normalizer": "unrotated", "mask": "full", "impl": impl
    }  # fmt: skip
    block = make_block(name, ours, case, run.device)
    with torch.no_grad():
        wide = block.widened()
        wanted = wide.forward(STOCK, wide.turns[0]).double()
        del wide
        errors = {each: relative_error(block.forward(each, block.turns[0]), wanted) for each in (STOCK, ours)}
        del wanted
    note = f"relative error {errors[impl]:.2g}, of the stock one {errors[STOCK]:.2g}"
    if not errors[impl] <= 1.1 * errors[STOCK]:
        run.add(**{**key, "pass": ""}, note=f"outside the budget: {note}")
        return
    inputs: Any = SimpleNamespace(q=block.do)
    for which in ("forward", "backward"):
        fns = [block.make_pass(impl, which, xs) for xs in block.turns]
        run.time(inputs, which, fns, **key, note=note)


def missing(impls: list[str]) -> dict[str, str]:
    """Return the implementations that can't be imported, and the reason for each."""
    found = {}
    for impl in impls:
        module = SANA_MODULE if impl == STOCK else PEERS[impl].module if impl in PEERS else None
        try:
            importlib.import_module(module or __name__)
        except Exception as error:  # the package's own imports may raise any exception
            found[impl] = describe_error(error)
    return found
