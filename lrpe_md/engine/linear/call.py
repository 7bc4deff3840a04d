"""Data classes that describe a call to linear attention, as :mod:`lrpe_md.engine.core.call` does for encodings."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ...norm import Norm
from ...reference_linear import Attention
from ..core.call import NO_WEIGHTS, Act, Impl, Layout, Options, Order, Pairs, Spec, Tables, Weights

MapOrNone = Literal["cosine", "rotate"] | None
NormalizerName = Literal["unrotated", "encoded", "none"]
Rule = Literal["add", "delta"]
Directions = Literal["forward", "both"]
State = tuple[Tensor, Tensor | None]  # S and Σ; Σ is None for normalizer "none"


class LinearOptions(NamedTuple):
    """Options that the user passed, excluding tensors and positions."""

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
    norm: Norm | None = None  # without its weight and bias
    rule: Rule = "add"
    directions: Directions = "forward"

    @property
    def encoding(self) -> Options:
        """Options of the map, the activation and the norm."""
        name: Any = self.map or "none"
        return Options(name, self.act, self.dim, self.pairs, self.rotary_dim, self.order, self.impl, self.norm)


class Description(NamedTuple):
    """Keyword arguments of :func:`lrpe_md.linear_attention` that an encoding supplies."""

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
    norm: Norm | None = None  # the norm that the encoding was called with


class Sides(NamedTuple):
    """Frequencies and positions as the user passed them. ``positions`` and ``phase`` may be pairs (for q, for k)."""

    omega: Tensor | None = None
    positions: Any = None
    phase: Any = None
    amplitude: float | Tensor | None = None
    cu_seqlens: Tensor | None = None


class LinearCall(NamedTuple):
    """A validated call, without the tensors in :class:`Operands`."""

    attention: Attention
    spec: Spec  # map=None becomes "none", with frequencies of shape (1, 0, 0)
    q_layout: Layout
    k_layout: Layout  # equal to q's in self-attention
    q_tables: Tables
    k_tables: Tables  # the same object as q_tables in self-attention, unless k has a separate phase
    cu_seqlens: Tensor | None = None  # (num_seqs + 1,) int32 or int64
    # Launches prepared for calls with the same sizes, dtypes and devices.
    launches: dict[Hashable, Any] | None = None
    weights: Weights = NO_WEIGHTS

    @property
    def has_one_side(self) -> bool:
        """Return whether q and k share positions and tables."""
        return self.k_tables is self.q_tables and self.k_layout.is_same(self.q_layout)

    def state_sizes(self, k: Tensor, v: Tensor) -> list[tuple[int, ...]]:
        """Return the shapes of S and, if there is a normaliser, of Σ. With both directions, the list is repeated."""
        num_seqs = k.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        width, normalizer = self.spec.out_dim(k.shape[3]), self.attention.normalizer
        sizes: list[tuple[int, ...]] = [(num_seqs, k.shape[1], width, v.shape[3])]
        if normalizer != "none":
            sizes.append((num_seqs, k.shape[1], k.shape[3] if normalizer == "unrotated" else width))
        return sizes * 2 if self.attention.has_both_directions else sizes


class Packing(NamedTuple):
    """Arguments of the registered operators that aren't in the other parts of a call."""

    cu_seqlens: Tensor | None
    one_side: bool


class Results(NamedTuple):
    """Flags that select what a forward pass returns in addition to o."""

    return_state: bool = False
    keep: bool = False  # also return tensors that the backward pass would otherwise recompute


class Operands(NamedTuple):
    """Tensor arguments that are neither in :class:`Sides` nor in :class:`LinearCall`.

    ``state`` is (S, Σ), (S,) or (). With both directions, there are twice as many tensors, as described in
    :func:`lrpe_md.reference_linear.attend`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None = None
    state: tuple[Tensor, ...] = ()
    decay: Tensor | None = None


class LinearNeeds(NamedTuple):
    """Flags for the gradients that a backward pass returns after dq, dk and dv, in this order."""

    gate: bool = False
    omega: bool = False  # summed over q and k
    phase_q: bool = False  # q's share of dφ
    phase_k: bool = False  # k's share of dφ, separate even if q and k share a phase
    norm: bool = False  # γ and β, if they exist
    state: bool = False  # S and Σ
    decay: bool = False
