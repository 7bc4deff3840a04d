"""Test cases and kernel inputs for tests and benchmarks.

:mod:`lrpe_md.testing` defines the error budgets. Float64 inputs have no more precise reference, so the error of a
float32 run is scaled by the ratio of the machine epsilons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lrpe_md import Coordinates, Grid, Norm, cosine, linear_attention, rotate
from lrpe_md.engine.core.call import NO_WEIGHTS, Positions
from lrpe_md.engine.core.norms import take_norm
from lrpe_md.engine.linear.call import LinearOptions, Operands, Sides
from lrpe_md.engine.linear.operator import ATTEND
from lrpe_md.engine.linear.validate import validate_linear
from lrpe_md.testing import Violation, find_violation, rounded_angles

__all__ = [
    "Case", "Inputs", "LinearCase", "LinearInputs", "as_tuple", "bind", "bind_linear", "check", "check_linear",
    "make_inputs", "make_linear_inputs", "make_tables", "run", "run_linear",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Settings that determine the result of a single call and are short enough to print."""

    map: Literal["cosine", "rotate"] = "cosine"
    shape: tuple[int, ...] = (3, 5)
    prefix: int = 1
    suffix: int = 0
    scale: tuple[float, ...] | float | None = None
    shift: tuple[float, ...] | float | None = None
    start: int = 0
    length: int | None = None
    origin: Literal["none", "shared", "by_sample"] = "none"  # origin of a grid, random integers up to 30
    coords: Literal["grid", "shared", "by_sample"] = "grid"
    coords_dtype: torch.dtype = torch.float32
    coords_scale: float = 20.0
    batch: int = 2
    heads: tuple[int, ...] = (4, 2)  # heads of q, or heads of q and of k
    omega_heads: int = 1
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    omega_dtype: torch.dtype = torch.float32
    act: str = "none"
    dim: int | None = None
    pairs: Any = "half"
    rotary_dim: int | slice | None = None
    order: str = "cos_sin"
    phase: bool = False
    amplitude_heads: int = 0  # 0: no amplitude
    masked: bool = False  # some rows of coords are not rotated
    tables: Literal["none", "pairs", "full"] = "none"  # random cos and sin in place of frequencies and positions
    tables_dtype: torch.dtype = torch.float32
    tables_layout: Literal["dense", "odd", "expanded", "complex", "complex odd"] = "dense"
    tables_batch: int = 1  # 1 or batch; the number of heads is omega_heads
    inverse: bool = False  # only for rotations with tables
    norm: Literal["none", "rms", "layer"] = "none"
    norm_over: Literal["head", "heads"] = "head"
    norm_weight: Literal["none", "shared", "by_head"] = "shared"  # always by head with norm_over="heads"
    norm_groups: int = 1  # number of token groups
    norm_bias: bool = True  # only for "layer"
    norm_dtype: torch.dtype | None = None  # dtype of γ and β; None means ``dtype``
    eps: float = 1e-6
    offset: float = 0.0
    zero_rows: bool = False  # some tokens are zero
    layout: Literal["bhnd", "bnhd", "packed", "odd"] = "bhnd"
    grad_layout: Literal["bhnd", "bnhd", "odd", "expanded"] = "bhnd"
    base: float = 100.0
    seed: int = 0

    @property
    def channels(self) -> int:
        """Number of channels (or pairs) per head that have an angle."""
        cut = self.rotary_dim if isinstance(self.rotary_dim, slice) else slice(self.rotary_dim)
        width = len(range(self.head_dim)[cut])
        return width if self.map == "cosine" else width // 2

    @property
    def out_dim(self) -> int:
        return self.head_dim + self.channels if self.map == "cosine" else self.head_dim

    def __str__(self) -> str:
        return _list_changes(self)


@dataclass
class Inputs:
    xs: list[Tensor]
    grads: list[Tensor]
    omega: Tensor
    phase: Tensor | None
    positions: Positions
    case: Case = field(default_factory=Case)
    amplitude: Tensor | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)  # weights of the norm: weight0, weight1, bias0, bias1
    tables: tuple[Tensor, ...] = ()  # cos and sin, or one complex tensor

    def norm(self, weights: Sequence[Tensor] | None = None) -> Norm | None:
        """Return the norm, optionally with different weights in the same order."""
        return _make_norm(self.case, self.weights, weights)

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the inputs with all floating-point tensors cast to a different dtype."""
        return _cast_fields(self, dtype)


def _list_changes(case: Any) -> str:
    """Return the fields of a case that differ from their defaults."""
    default = type(case)()
    changed = {k: v for k, v in vars(case).items() if v != getattr(default, k)}
    return ", ".join(f"{k}={v}" for k, v in changed.items()) or "default"


AnyInputs = TypeVar("AnyInputs", bound="Inputs | LinearInputs")


def _cast_fields(inputs: AnyInputs, dtype: torch.dtype) -> AnyInputs:
    def cast(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(cast, value))
        if isinstance(value, dict):
            return {name: cast(t) for name, t in value.items()}
        if isinstance(value, Coordinates):
            return replace(value, coords=cast(value.coords))
        if isinstance(value, Tensor) and value.is_complex():
            return value.to(dtype.to_complex())
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return replace(inputs, **{name: cast(value) for name, value in vars(inputs).items() if name != "case"})


def _make_norm(case: Case, own: dict[str, Tensor], weights: Sequence[Tensor] | None) -> Norm | None:
    if case.norm == "none":
        return None
    named = dict(zip(own, weights or own.values(), strict=True))

    def pair(name: str) -> Any:
        found = tuple(t for key, t in named.items() if key.startswith(name))
        return found[0] if len(found) == 1 else found or None

    return Norm(case.norm, pair("weight"), pair("bias"), case.eps, case.norm_over, case.offset)


def _strided(values: Tensor, layout: str, width: int = 1) -> Tensor:
    """Copy values (B, H, N, D) into a tensor with a given memory layout, and fill its gaps with NaN."""
    b, h, n, d = values.shape
    if layout == "bhnd":
        return values.contiguous()
    if layout == "bnhd":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":  # the middle slice of a projection (B, N, 3, H, D)
        packed = values.new_full((b, n, 3, h, d), float("nan"))
        packed[:, :, width] = values.transpose(1, 2)
        return packed[:, :, width].transpose(1, 2)
    if layout == "odd":  # strided channels and unaligned rows
        place = values.new_full((n + 1, b, d, h, 3), float("nan"))
        view = place[1:, :, :, :, width].permute(1, 3, 0, 2)
        view.copy_(values)
        return view
    assert layout == "expanded", layout
    return values[:1].expand(b, h, n, d)


def make_positions(case: Case, device: torch.device | str = "cpu") -> Positions:
    generator = torch.Generator().manual_seed(case.seed + 1)
    if case.coords == "grid":
        origin = None
        if case.origin != "none":
            size = (case.batch, len(case.shape)) if case.origin == "by_sample" else (len(case.shape),)
            origin = torch.randint(-30, 30, size, generator=generator).to(device)
        return Grid(case.shape, case.prefix, case.suffix, case.scale, case.shift, case.start, case.length, origin)
    num = torch.Size(case.shape).numel()
    size = (case.batch, num, len(case.shape)) if case.coords == "by_sample" else (num, len(case.shape))
    coords = torch.randn(size, generator=generator, dtype=torch.float64) * case.coords_scale
    if not case.coords_dtype.is_floating_point:
        coords = coords.round()
    rotated = (torch.rand(size[:-1], generator=generator) < 0.7).to(device) if case.masked else None
    return Coordinates(coords.to(device, case.coords_dtype), case.prefix, case.suffix, rotated)


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Make random inputs, which are the same on all devices."""
    generator = torch.Generator().manual_seed(case.seed)
    positions = make_positions(case, device)
    assert not isinstance(positions, Tensor)
    num_tokens = positions.num_tokens

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32)

    xs, grads = [], []
    for i, heads in enumerate(case.heads):
        x = randn(case.batch, heads, num_tokens, case.head_dim).to(device, case.dtype)
        if case.zero_rows:
            x[:, :, ::3] = 0
        g = randn(case.batch, heads, num_tokens, case.out_dim).to(device, case.dtype)
        xs.append(_strided(x, case.layout, i))
        grads.append(_strided(g, case.grad_layout, i))
    omega, phase, amplitude = _make_frequencies(case, randn, device)
    weights = _make_weights(case, randn, device)
    tables = make_tables(case, randn, device)
    return Inputs(xs, grads, omega, phase, positions, case, amplitude, weights, tables)


def _make_frequencies(
    case: Case, randn: Callable[..., Tensor], device: torch.device | str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Make random omega, phase and amplitude."""
    exponent = torch.arange(case.channels, dtype=torch.float64) / max(case.channels, 1)
    direction = randn(case.omega_heads, case.channels, len(case.shape)).double()
    omega = (direction * case.base ** -exponent[:, None]).to(device, case.omega_dtype)
    phase = randn(case.omega_heads, case.channels).mul(3).to(device) if case.phase else None
    amplitude = None
    if case.amplitude_heads:
        amplitude = randn(case.amplitude_heads, case.channels).mul(0.5).add(1.5).to(device)
    return omega, phase, amplitude


def make_tables(case: Case, randn: Callable[..., Tensor], device: torch.device | str) -> tuple[Tensor, ...]:
    """Make tables of random numbers instead of actual cos and sin, so that every entry matters. Gaps contain NaN.

    randn: function that draws a random tensor of a given size.
    """
    if case.tables == "none":
        return ()
    width = case.channels * (2 if case.tables == "full" and case.map == "rotate" else 1)
    rows = torch.Size(case.shape).numel()
    cos, sin = (randn(case.tables_batch, case.omega_heads, rows, width).to(device, case.tables_dtype) for _ in range(2))
    found: tuple[Tensor, ...] = (cos, sin)
    if case.tables_layout.startswith("complex"):
        found = (torch.complex(cos, sin),)
    if case.tables_layout == "odd":
        found = _strided(cos, "odd"), _strided(sin, "bnhd")
    elif case.tables_layout == "complex odd":
        found = (_strided(found[0], "odd"),)
    elif case.tables_layout == "expanded":
        heads = case.heads[-1] if case.omega_heads == 1 else -1
        return tuple(t.expand(case.batch, heads, -1, -1) for t in found)
    if case.omega_heads > 1:
        return found
    return tuple(t[:, 0] if case.tables_batch > 1 else t[0, 0] for t in found)


def _make_weights(case: Case, randn: Callable[..., Tensor], device: torch.device | str) -> dict[str, Tensor]:
    found = {}
    if case.norm == "none" or case.norm_weight == "none":
        return found
    for name in ("weight", *(("bias",) if case.norm == "layer" and case.norm_bias else ())):
        for i, heads in enumerate(case.heads):
            by_head = case.norm_over == "heads" or case.norm_weight == "by_head"
            size = (heads, case.head_dim) if by_head else (case.head_dim,)
            if case.norm_groups > 1:
                size = (case.norm_groups, heads if by_head else 1, case.head_dim)
            values = randn(*size).mul(0.5) + (name == "weight") - case.offset
            found[f"{name}{i}"] = values.to(device, case.norm_dtype or case.dtype)
    return found


def as_tuple(ys: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a result as a tuple, wrapping a single tensor."""
    return ys if isinstance(ys, tuple) else (ys,)


def bind(inputs: Inputs, impl: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function (xs, omega, phase=None, weights=None) -> ys that calls the operator with the case's options."""
    case = inputs.case
    call: Any = cosine if case.map == "cosine" else rotate
    options: dict[str, Any] = {"impl": impl, "act": case.act, "dim": case.dim}
    if inputs.tables:
        options |= {"tables": inputs.tables if len(inputs.tables) == 2 else inputs.tables[0], "prefix": case.prefix}
        options |= {"inverse": case.inverse} if case.map == "rotate" else {}
    else:
        options |= {"positions": inputs.positions, "amplitude": inputs.amplitude}
    if case.map == "rotate":
        options |= {"pairs": case.pairs, "rotary_dim": case.rotary_dim}
    else:
        options |= {"order": case.order}

    def forward(
        xs: Sequence[Tensor], omega: Tensor, phase: Tensor | None = None, weights: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        frequencies = {} if inputs.tables else {"omega": omega, "phase": phase}
        return as_tuple(call(*xs, norm=inputs.norm(weights), **frequencies, **options))

    return forward


def run(inputs: Inputs, impl: str, *, frequencies: bool = True) -> dict[str, Tensor]:
    """Run a forward and a backward pass, and return the outputs and gradients by name.

    The names are y0 (and y1), dx0 (and dx1), domega and dphase, and dweight0, ... for a norm.
    """
    frequencies = frequencies and not inputs.tables
    xs = [x.detach().requires_grad_() for x in inputs.xs]
    omega = inputs.omega.detach().requires_grad_(frequencies)
    phase = None if inputs.phase is None else inputs.phase.detach().requires_grad_(frequencies)
    weights = {f"d{name}": t.detach().requires_grad_() for name, t in inputs.weights.items()}
    ys = bind(inputs, impl)(xs, omega, phase, list(weights.values()))
    wanted = {f"dx{i}": x for i, x in enumerate(xs)}
    if frequencies:
        wanted["domega"] = omega
        if phase is not None:
            wanted["dphase"] = phase
    wanted |= weights
    found = torch.autograd.grad(ys, list(wanted.values()), inputs.grads)
    return {**{f"y{i}": y.detach() for i, y in enumerate(ys)}, **dict(zip(wanted, found, strict=True))}


def check(
    case: Case,
    impl: str = "triton",
    device: torch.device | str = "cpu",
    *,
    frequencies: bool = True,
    ulps: float = 0.0,
) -> list[Violation]:
    """Run a case with ``impl``, and return its violations of the error budget.

    The gradients of ω, φ, norm weights and state sums have few entries, each of which is a sum, so a correct result may
    fail on a single random draw. In about one in a hundred draws, the reference's error is below half of its mean, or
    below a third for 16 entries. Therefore, if only these gradients violate the budget, and they have fewer than 32
    entries or exceed the budget by at most 50% in RMS, five draws are judged together.
    """

    def draw(seed: int) -> Draw:
        inputs = make_inputs(replace(case, seed=seed), device)
        run_case = partial(run, frequencies=frequencies)
        return _draw(inputs, impl, run_case, lambda judged: run_case(judged, "reference"))

    return _check_case(draw, case, ulps)


def _check_case(draw_from: Callable[[int], Draw], case: Case | LinearCase, ulps: float) -> list[Violation]:
    draw = draw_from(case.seed)
    found = _violations(draw, case, ulps)
    if found and all(
        v.name in _SUMS and (v.rms <= 1.5 * v.rms_budget or draw[v.name][0].numel() < _FEW) for v in found
    ):
        draws = [draw] + [draw_from(case.seed + i) for i in range(1, 5)]
        pooled = {
            name: tuple(torch.cat([d[name][i].flatten() for d in draws]) for i in range(3)) for name in draw
        }  # fmt: skip
        found = _violations(pooled, case, ulps)
    return found


_FEW = 32
_SUMS = ("domega", "dphase", "ddecay", "dweight0", "dweight1", "dbias0", "dbias1", "dsums")
Draw = dict[str, tuple[Tensor, ...]]


def _draw(inputs: Any, impl: str, run_case: Callable[..., Any], run_rounded: Callable[[Any], Any]) -> Draw:
    """Return each result as computed by ``impl``, with the reference's error and the exact value.

    run_rounded: function that runs the reference at the inputs' precision.
    """
    actual = run_case(inputs, impl)
    exact = run_case(inputs.to(torch.float64), "reference")
    scale, judged, judge = 1.0, inputs, exact
    if inputs.case.dtype == torch.float64:
        scale, judged = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps, inputs.to(torch.float32)
        if isinstance(inputs, Inputs) and isinstance(judged.positions, Grid):
            # a grid's coordinates are float64 unless they are indices
            positions = judged.positions.explicit(judged.omega.device, torch.float32)
            judged = replace(judged, positions=positions)
        judge = run_case(judged.to(torch.float64), "reference")
    with rounded_angles():
        same = run_rounded(judged)
    for name in exact:
        assert actual[name].shape == exact[name].shape, (name, actual[name].shape, exact[name].shape)
        assert scale != 1 or actual[name].dtype == same[name].dtype, name
    return {name: (actual[name], scale * (same[name].double() - judge[name]).abs(), exact[name]) for name in exact}


def _violations(draw: Draw, case: Case | LinearCase, ulps: float) -> list[Violation]:
    judged = [
        find_violation(name, actual, error, exact, case, 0.0 if name in _SUMS and actual.dtype.itemsize > 2 else ulps)
        for name, (actual, error, exact) in draw.items()
    ]
    return [violation for violation in judged if violation is not None]


# --- linear attention ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearCase:
    """Settings that determine the result of a call of linear attention and are short enough to print."""

    map: Literal["cosine", "rotate"] | None = "cosine"
    shape: tuple[int, ...] = (3, 5)
    prefix: int = 1
    suffix: int = 0
    k_shape: tuple[int, ...] | None = None  # shape of the keys in cross-attention
    k_positions: tuple[tuple[str, Any], ...] = ()  # fields of Case whose values differ for the keys
    batch: int = 2
    heads: tuple[int, int] = (4, 2)  # heads of q, and heads of k and v
    head_dim: int = 16
    v_dim: int | None = None  # None means head_dim
    dtype: torch.dtype = torch.float32
    act: str = "relu"
    dim: int | None = None
    pairs: Any = "half"
    rotary_dim: int | slice | None = None
    order: str = "cos_sin"
    phase: Literal["none", "both", "k"] = "none"
    amplitude_heads: int = 0  # 0: no amplitude
    omega_heads: int = 1
    omega_dtype: torch.dtype = torch.float32
    coords: Literal["grid", "shared", "by_sample"] = "grid"
    origin: Literal["none", "shared", "by_sample"] = "none"
    scale: tuple[float, ...] | float | None = None
    masked: bool = False  # some rows of coords are not rotated
    normalizer: Literal["unrotated", "encoded", "none"] = "unrotated"
    gate: Literal["none", "float", "bool", "nan"] = "none"  # nan: gated keys and values are NaN
    gate_heads: int = 1
    mask: Literal["full", "causal", "block"] = "full"
    norm: Literal["none", "rms", "layer"] = "none"  # this field and the next ones as in Case
    norm_over: Literal["head", "heads"] = "head"
    norm_weight: Literal["none", "shared", "by_head"] = "shared"
    norm_groups: int = 1
    norm_bias: bool = True
    norm_dtype: torch.dtype | None = None
    norm_eps: float = 1e-6
    offset: float = 0.0
    block: int = 0  # for mask "block"
    cu_seqlens: tuple[int, ...] | None = None  # lengths of the packed sequences
    state: bool = False
    return_state: bool = False
    decay: Literal["none", "head", "block"] = "none"  # per head, or per head and block (token if causal)
    rule: Literal["add", "delta"] = "add"
    directions: Literal["forward", "both"] = "forward"
    layout: Literal["bhnd", "bnhd", "packed", "odd"] = "bhnd"
    grad_layout: Literal["bhnd", "bnhd", "odd", "expanded"] = "bhnd"
    eps: float = 1e-6
    base: float = 100.0
    seed: int = 0

    @property
    def encoding(self) -> Case:
        """Return the case that encodes q with the same positions, frequencies and norm."""
        return Case(
            self.map or "cosine", self.shape, self.prefix, self.suffix, self.scale, coords=self.coords,
            origin=self.origin, masked=self.masked, batch=self.batch, heads=self.heads, omega_heads=self.omega_heads,
            head_dim=self.head_dim, rotary_dim=self.rotary_dim, base=self.base, seed=self.seed, dtype=self.dtype,
            norm=self.norm, norm_over=self.norm_over, norm_weight=self.norm_weight, norm_groups=self.norm_groups,
            norm_bias=self.norm_bias, norm_dtype=self.norm_dtype, eps=self.norm_eps, offset=self.offset,
            omega_dtype=self.omega_dtype, phase=self.phase != "none", amplitude_heads=self.amplitude_heads,
        )  # fmt: skip

    @property
    def has_positions(self) -> bool:
        """Return whether the call needs positions."""
        return self.map is not None or self.mask == "block" or self.norm_groups > 1

    @property
    def key_scale(self) -> float:
        """Factor for the random keys that limits the eigenvalues of the delta rule's A to about 1."""
        return (self.head_dim * self.block) ** -0.5 if self.rule == "delta" else 1.0

    @property
    def out_dim(self) -> int:
        """Number of channels per head of q̂ and k̂."""
        return self.encoding.out_dim if self.map == "cosine" else self.head_dim

    def __str__(self) -> str:
        return _list_changes(self)


@dataclass
class LinearInputs:
    qkv: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    omega: Tensor | None
    phase: Tensor | None
    positions: Any  # positions of q, or a pair
    gate: Tensor | None
    cu_seqlens: Tensor | None
    state: tuple[Tensor, ...]
    grad_state: tuple[Tensor, ...]
    case: LinearCase = field(default_factory=LinearCase)
    amplitude: Tensor | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)  # as in Inputs
    decay: Tensor | None = None

    def norm(self, weights: Sequence[Tensor] | None = None) -> Norm | None:
        """Return the norm, optionally with different weights in the same order."""
        return _make_norm(self.case.encoding, self.weights, weights)

    def to(self, dtype: torch.dtype) -> LinearInputs:
        """Return the inputs with all floating-point tensors cast to a different dtype."""
        return _cast_fields(self, dtype)


def make_linear_inputs(case: LinearCase, device: torch.device | str = "cpu") -> LinearInputs:
    """Make random inputs, which are the same on all devices."""
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32)

    positions: Any = make_positions(case.encoding, device)
    num_q = num_k = positions.num_tokens
    if case.k_shape is not None:
        of_keys = replace(case.encoding, shape=case.k_shape, seed=case.seed + 7, **dict(case.k_positions))
        keys: Any = make_positions(of_keys, device)
        positions, num_k = (positions, keys), keys.num_tokens
    (h_q, h_k), v_dim = case.heads, case.v_dim or case.head_dim
    q, k, v = (
        randn(case.batch, heads, num, width).to(case.dtype)
        for heads, num, width in ((h_q, num_q, case.head_dim), (h_k, num_k, case.head_dim), (h_k, num_k, v_dim))
    )
    k = k * case.key_scale
    grad = randn(case.batch, h_q, num_q, v_dim).to(device, case.dtype)
    gate = None
    if case.gate != "none":
        gate = torch.rand(case.batch, case.gate_heads, num_k, generator=generator).add(0.25)
        gate = torch.where(torch.rand(gate.shape, generator=generator) < 0.3, 0, gate)
        if case.rule == "delta" and case.norm != "none":  # the norm would undo the scaling of the keys
            gate = gate / (case.head_dim * case.block)
        if case.gate == "nan":
            out = (gate == 0).expand(-1, h_k, -1)[..., None]
            k, v = (torch.where(out, float("nan"), t) for t in (k, v))
        gate = (gate > 0 if case.gate == "bool" else gate).to(device)
    qkv: Any = tuple(_strided(t.to(device), case.layout, i) for i, t in enumerate((q, k, v)))
    num_seqs = case.batch if case.cu_seqlens is None else len(case.cu_seqlens)
    sums: list[tuple[int, ...]] = [(num_seqs, h_k, case.out_dim, v_dim)]
    if case.normalizer != "none":
        sums.append((num_seqs, h_k, case.head_dim if case.normalizer == "unrotated" else case.out_dim))
    wide = torch.promote_types(case.dtype, torch.float32)
    before, after = (
        tuple(randn(*size).mul(scale).to(device, wide) for size, scale in zip(sums, scales, strict=False))
        for scales in ((3.0, 3.0), (0.1, 0.1))
    )
    before = tuple(t.abs() if i else t for i, t in enumerate(before)) if case.normalizer == "unrotated" else before
    cu_seqlens = None
    if case.cu_seqlens is not None:
        cu_seqlens = torch.tensor([0, *case.cu_seqlens]).cumsum(0).to(device, torch.int32)
    frequencies = (None, None, None) if case.map is None else _make_frequencies(case.encoding, randn, device)
    omega, phase, amplitude = frequencies
    return LinearInputs(
        qkv, _strided(grad, case.grad_layout), omega, phase, positions if case.has_positions else None, gate,
        cu_seqlens, before if case.state else (), after if case.return_state else (), case, amplitude,
        _make_weights(case.encoding, randn, device), _make_decay(case, num_k, device),
    )  # fmt: skip


def _make_decay(case: LinearCase, num_tokens: int, device: torch.device | str) -> Tensor | None:
    if case.decay == "none":
        return None
    heads = case.heads[1]
    blocks = math.prod(case.shape) // case.block if case.mask == "block" else num_tokens
    size = (heads,) if case.decay == "head" else (case.batch, heads, blocks)
    return torch.rand(size, generator=torch.Generator().manual_seed(case.seed + 3)).mul(0.7).add(0.3).to(device)


def bind_linear(inputs: LinearInputs, impl: str, operands: torch.dtype | None = None) -> Callable[..., Any]:
    """Return a function (q, k, v, omega, phase, gate, state, weights, decay) -> (o, state) that calls the operator.

    operands: dtype to which the reference rounds its matmul operands, as the kernels do for 16-bit inputs.
    """
    case = inputs.case

    def forward(
        qkv: Sequence[Tensor],
        omega: Any = None,
        phase: Any = None,
        gate: Any = None,
        state: Sequence[Tensor] = (),
        weights: Sequence[Tensor] | None = None,
        decay: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        norm = inputs.norm(weights)
        phases = (None, phase) if case.phase == "k" and phase is not None else phase
        options: dict[str, Any] = {
            "map": case.map, "act": case.act, "dim": case.dim, "pairs": case.pairs, "rotary_dim": case.rotary_dim,
            "order": case.order, "normalizer": case.normalizer, "is_causal": case.mask == "causal",
            "block": case.block if case.mask == "block" else None, "eps": case.eps, "impl": impl,
            "rule": case.rule, "directions": case.directions,
        }  # fmt: skip
        if operands is not None:
            q, k, v = qkv
            given = Operands(q, k, v, gate, tuple(state), decay)
            sides = Sides(omega, inputs.positions, phases, inputs.amplitude, inputs.cu_seqlens)
            own, own_weights = LinearOptions(**options), NO_WEIGHTS
            if norm is not None:
                own, own_weights = take_norm(own, norm, 2)
            call = validate_linear(own, given, sides, own_weights)
            o, *after = ATTEND.run_reference(call, given, operands)
            return o, tuple(after)
        before: Any = tuple(state) or None
        found: Any = linear_attention(
            *qkv, omega=omega, positions=inputs.positions, phase=phases, amplitude=inputs.amplitude, gate=gate,
            cu_seqlens=inputs.cu_seqlens, state=before, return_state=case.return_state, norm=norm, decay=decay,
            **options,
        )  # fmt: skip
        o, after = found if case.return_state else (found, ())
        return o, tuple(t for t in after if t is not None)

    return forward


def run_linear(
    inputs: LinearInputs, impl: str, *, frequencies: bool = True, operands: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Run linear attention forward and backward, and return the outputs and gradients by name.

    The names are o, dq, dk and dv, then dgate (for a float gate), ddecay, domega and dphase. States add S, sums, dS and
    dsums, and a norm adds dweight0, ...
    """
    names = ("S", "sums")
    qkv = [t.detach().requires_grad_() for t in inputs.qkv]
    wanted: dict[str, Tensor] = dict(zip(("dq", "dk", "dv"), qkv, strict=True))

    def learn(name: str, t: Tensor | None, learned: bool = True) -> Tensor | None:
        if t is None or not learned or not t.is_floating_point():
            return t
        wanted[name] = t.detach().requires_grad_()
        return wanted[name]

    gate = learn("dgate", inputs.gate)
    omega, phase = learn("domega", inputs.omega, frequencies), learn("dphase", inputs.phase, frequencies)
    state = [learn(f"d{name}", t) for name, t in zip(names, inputs.state, strict=False)]
    weights = [learn(f"d{name}", t) for name, t in inputs.weights.items()]
    decay = learn("ddecay", inputs.decay)
    o, after = bind_linear(inputs, impl, operands)(qkv, omega, phase, gate, state, weights, decay)
    after = after[: len(inputs.grad_state)]
    outputs = {"o": o, **dict(zip(names, after, strict=False))}
    grads = [inputs.grad, *inputs.grad_state]
    found = torch.autograd.grad(list(outputs.values()), list(wanted.values()), grads)
    return {**{name: t.detach() for name, t in outputs.items()}, **dict(zip(wanted, found, strict=True))}


def check_linear(
    case: LinearCase,
    impl: str = "triton",
    device: torch.device | str = "cpu",
    *,
    frequencies: bool = True,
    ulps: float = 0.0,
) -> list[Violation]:
    """Run a case of linear attention with ``impl``, and return its violations of the error budget.

    For 16-bit inputs, the kernels multiply bfloat16 operands. With bfloat16 inputs and full attention, o and dv are
    compared with the plain reference, because they are rounded to bfloat16 in any case. All other results are compared
    with a reference that also has bfloat16 operands:

    - float32 results: the state, and the gradients of the gate, the frequencies and the state
    - float16 results, which are more precise than the operands
    - dq and dk, which are differences (exactly 0 if a token attends to only one token)
    - normalizer "encoded", which divides by a difference, and causal or block masks
    - a single key, where o equals v and the plain reference has no error
    """
    run_case = partial(run_linear, frequencies=frequencies)

    def run_rounded(judged: LinearInputs) -> dict[str, Tensor]:
        same = run_case(judged, "reference")
        if case.dtype.itemsize == 2:
            rounded = run_case(judged, "reference", operands=torch.bfloat16)
            steady = case.mask == "full" and case.normalizer != "encoded" and case.dtype == torch.bfloat16
            steady = steady and judged.qkv[1].shape[2] > 1
            plain = ("o", "dv") if steady else ()
            same |= {name: rounded[name] for name in same.keys() - set(plain)}
        return same

    def draw(seed: int) -> Draw:
        return _draw(make_linear_inputs(replace(case, seed=seed), device), impl, run_case, run_rounded)

    return _check_case(draw, case, ulps)
