"""A call of linear attention as one value, as :mod:`lrpe_md.engine.call` has it for one of the maps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..reference_linear import Attention
from .call import Act, Impl, Layout, Options, Order, Pairs, Spec, Tables

__all__ = [
    "LinearCall", "LinearNeeds", "LinearOptions", "MapOrNone", "NormalizerName", "Side", "Sides", "State", "ends_of",
]  # fmt: skip

MapOrNone = Literal["cosine", "rotate"] | None
NormalizerName = Literal["unrotated", "encoded", "none"]
State = tuple[Tensor, Tensor | None]  # S and Σ, None for normalizer "none"


class LinearOptions(NamedTuple):
    """What a user asks for, beside the tensors and the positions, as it was given."""

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

    @property
    def encoding(self) -> Options:
        """Those of the map and the activation."""
        name: Any = self.map or "none"
        return Options(name, self.act, self.dim, self.pairs, self.rotary_dim, self.order, self.impl)


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
    cu_seqlens: Tensor | None = None  # (num_seqs + 1,) int32
    # What was prepared for calls of the same sizes, dtypes and devices.
    launches: dict[Hashable, Any] | None = None


class Side(NamedTuple):
    """Where the tokens of q or of k are."""

    layout: Layout
    tables: Tables


class LinearNeeds(NamedTuple):
    """Which gradients a backward forms beside those of q, k and v, in their order."""

    gate: bool = False
    omega: bool = False
    q_phase: bool = False  # of the phase that q and k share: what both leave
    k_phase: bool = False  # of a phase of k's own
    state: bool = False  # S and Σ


def ends_of(layout: Layout) -> tuple[int, int]:
    """How many of these tokens are prefix and suffix."""
    num_tokens, prefix, num_grid, start, _ = layout
    before = max(0, min(prefix - start, num_tokens))
    after = max(0, min(start + num_tokens - prefix - num_grid, num_tokens))
    return before, after
