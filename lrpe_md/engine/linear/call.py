"""A call of linear attention as one value, as :mod:`lrpe_md.engine.core.call` has it for one of the maps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ...norm import Norm
from ...reference_linear import Attention
from ..core.call import (
    NO_WEIGHTS,
    Act,
    Impl,
    Layout,
    NormOptions,
    Options,
    Order,
    Pairs,
    Spec,
    Tables,
    Weights,
    declare,
    take_fields,
)

__all__ = [
    "LINEAR_CALL", "Description", "LinearCall", "LinearKnown", "LinearNeeds", "LinearOptions", "MapOrNone",
    "NormalizerName", "Operands", "Sides", "State", "ends_of", "flatten_linear", "unflatten_linear",
]  # fmt: skip

MapOrNone = Literal["cosine", "rotate"] | None
NormalizerName = Literal["unrotated", "encoded", "none"]
State = tuple[Tensor, Tensor | None]  # S and Σ, None for normalizer "none"


class LinearOptions(NamedTuple):
    """The user's choices, as passed, without tensors and positions."""

    map: MapOrNone = "cosine"
    act: Act = "relu"
    dim: int | None = None
    pairs: Pairs = "half"
    rotary_dim: int | slice | None = None
    order: Order = "cos_sin"
    normalizer: NormalizerName = "unrotated"
    is_causal: bool = False
    block: int | None = None
    eps: float = 1e-6
    return_state: bool = False
    impl: Impl = "auto"
    norm: NormOptions | None = None

    @property
    def encoding(self) -> Options:
        """The options of the map, the activation and the norm."""
        name: Any = self.map or "none"
        return Options(name, self.act, self.dim, self.pairs, self.rotary_dim, self.order, self.impl, self.norm)


class Description(NamedTuple):
    """An encoding's part of a call: keyword arguments of :func:`lrpe_md.linear_attention`."""

    map: MapOrNone
    omega: Tensor | None = None
    act: Act = "none"
    dim: int | None = None
    phase: Tensor | tuple[Tensor | None, Tensor | None] | None = None
    pairs: Pairs = "half"
    rotary_dim: int | slice | None = None
    amplitude: float | Tensor | None = None
    order: Order = "cos_sin"
    impl: Impl = "auto"
    norm: Norm | None = None  # that the encoding was called with


class Sides(NamedTuple):
    """Frequencies and places, as they were given: one for q and k, or of positions and phase a pair."""

    omega: Tensor | None = None
    positions: Any = None
    phase: Any = None
    amplitude: float | Tensor | None = None


class LinearCall(NamedTuple):
    """A checked call, all of it but q, k, v, the gate and the state."""

    attention: Attention
    spec: Spec  # for map=None "none", and a table of frequencies (1, 0, 0)
    q_layout: Layout
    k_layout: Layout  # equal to q's in self-attention
    q_tables: Tables
    k_tables: Tables  # q's itself in self-attention without a phase of its own
    cu_seqlens: Tensor | None = None  # (num_seqs + 1,) int32 or int64
    # What was prepared for calls of the same sizes, dtypes and devices.
    launches: dict[Hashable, Any] | None = None
    weights: Weights = NO_WEIGHTS


class Operands(NamedTuple):
    """Tensors that are not in the call. state: (S, Σ), (S,) or ()."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None
    state: tuple[Tensor, ...]


class LinearNeeds(NamedTuple):
    """Gradients that a backward forms in addition to dq, dk and dv, in the order of the results."""

    gate: bool = False
    omega: bool = False  # of q and of k, summed
    phase_q: bool = False  # what q leaves, and
    phase_k: bool = False  # what k does, also where they share a phase
    norm: bool = False  # all of γ and β that there are
    state: bool = False  # S and Σ


def ends_of(layout: Layout) -> tuple[int, int]:
    """Count the prefix and suffix tokens."""
    num_tokens, prefix, num_grid, start, _ = layout
    before = max(0, min(prefix - start, num_tokens))
    after = max(0, min(start + num_tokens - prefix - num_grid, num_tokens))
    return before, after


# --- across the registered operators -------------------------------------------------------------------------

LINEAR_CALL = ", ".join(
    [
        declare(Attention, "SymInt"), declare(Spec), declare(Layout, "SymInt", "q_"), declare(Layout, "SymInt", "k_"),
        declare(Tables, prefix="q_"), declare(Tables, prefix="k_"), declare(Weights), "Tensor? cu_seqlens",
        "bool one_side",
    ]
)  # fmt: skip


def flatten_linear(call: LinearCall) -> tuple[Any, ...]:
    """A call as arguments of an operator: those of ``LINEAR_CALL``."""
    parts = (
        call.attention, call.spec, call.q_layout, call.k_layout, call.q_tables, call.k_tables, call.weights
    )  # fmt: skip
    values = tuple(list(value) if isinstance(value, tuple) else value for part in parts for value in part)
    return *values, call.cu_seqlens, call.k_tables is call.q_tables and call.k_layout.is_same(call.q_layout)


def unflatten_linear(args: Sequence[Any]) -> tuple[LinearCall, tuple[Any, ...]]:
    """The inverse of :func:`flatten_linear`, and the arguments behind."""
    values = iter(args)
    kinds: Any = (Attention, Spec, Layout, Layout, Tables, Tables, Weights)
    attention, spec, q_layout, k_layout, q_tables, k_tables, weights = (take_fields(kind, values) for kind in kinds)
    cu_seqlens, one_side = next(values), next(values)
    if one_side:
        k_layout, k_tables = q_layout, q_tables
    call = LinearCall(attention, spec, q_layout, k_layout, q_tables, k_tables, cu_seqlens, None, weights)
    return call, tuple(values)


# --- the memo ------------------------------------------------------------------------------------------------


class LinearKnown(NamedTuple):
    """Cached result of validating sizes, dtypes and devices, with the launches prepared for them."""

    attention: Attention
    spec: Spec
    layout: Layout
    launches: dict[Hashable, Any]
