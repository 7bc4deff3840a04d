"""Data classes that describe a call.

:class:`Options` holds the options that the user passed. :class:`Call` holds the validated arguments, which all lower
layers use. :class:`Variant` holds all compile-time settings of a kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...norm import Norm
from ...positions.coordinates import Coordinates
from ...positions.grid import Grid, grid_coordinates
from ...reference import Act, MapName, Scales, Spec

Impl = Literal["auto", "triton", "reference"]
Pairs = Literal["half", "interleaved"] | Sequence[int]
Order = Literal["cos_sin", "sin_cos"]
Positions = Grid | Coordinates | Tensor


class Options(NamedTuple):
    """Options that the user passed, excluding tensors and positions."""

    map: MapName
    act: Act = "none"
    dim: int | None = None
    pairs: Pairs = "half"
    rotary_dim: int | slice | None = None
    order: Order = "cos_sin"
    impl: Impl = "auto"
    norm: Norm | None = None  # without its weight and bias


class Tables(NamedTuple):
    """Tensors that define positions and angles. The kernels compute gradients only for omega and phase."""

    omega: Any  # (H or 1, C, K); None if the caller passes cos and sin
    phase: Tensor | None = None  # (H or 1, C)
    coords: Tensor | None = None  # (N, K) or (B, N, K), without prefix and suffix
    origin: Tensor | None = None  # a grid's origin: (K,) or (B, K)
    affine: Tensor | None = None  # a grid's scale and shift: (K, 2)
    rotated: Tensor | None = None  # (N,) or (B, N), like coords: whether each token is rotated
    amplitude: Tensor | None = None  # (H or 1, C)

    @property
    def by_sample(self) -> bool:
        """Return whether each sample has its own coordinates or its own origin."""
        coords, origin = self.coords, self.origin
        return (coords is not None and coords.ndim == 3) or (origin is not None and origin.ndim == 2)


NO_TABLES = Tables(None)


class CosSin(NamedTuple):
    """Cos and sin that the caller passes instead of positions: (N, W), (B or 1, N, W) or (B or 1, H or 1, N, W).

    For the cosine map, W is the number of channels. For a rotation, W is the number of pairs or of channels.
    """

    cos: Tensor | None = None  # if sin is None, a tensor (..., W, 2) with both cos and sin
    sin: Tensor | None = None
    inverse: bool = False  # sin is negated

    @property
    def shape(self) -> torch.Size:
        """Shape shared by cos and sin."""
        assert self.cos is not None
        return self.cos.shape if self.sin is not None else self.cos.shape[:-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that are not None."""
        return tuple(t for t in self[:2] if t is not None)

    def strides(self) -> tuple[tuple[int, int, int, int], ...]:
        """Return the strides (b, h, n, d) of cos and of sin. b is 0 if samples share rows, and h is 0 if heads do."""
        table_strides = []
        for t in self.tensors:
            *outer, rows, entries = t.stride()[: len(self.shape)]
            steps = [step if size > 1 else 0 for step, size in zip(outer, self.shape, strict=False)]
            batch, heads = {0: (0, 0), 1: (*steps, 0)}.get(len(steps), tuple(steps))
            table_strides.append((batch, heads, rows, entries))
        return tuple(table_strides)

    @property
    def num_heads(self) -> int:
        """Number of heads with separate rows, or 1 if all heads share their rows."""
        return self.shape[1] if any(heads for _, heads, _, _ in self.strides()) else 1

    @property
    def by_sample(self) -> bool:
        """Return whether each sample has its own rows."""
        return any(batch for batch, _, _, _ in self.strides())

    def split(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin as separate tensors.

        If ``inverse`` is set, sin is a negated copy. Otherwise, both are views.
        """
        assert self.cos is not None
        cos, sin = self.cos.unbind(-1) if self.sin is None else (self.cos, self.sin)
        return cos, -sin if self.inverse else sin


NO_COS_SIN = CosSin()


class Weights(NamedTuple):
    """γ and β of the norm, for q (or the only tensor) and for k. Their shape is (D,), (H, D) or (P, 1 or H, D)."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    weight_k: Tensor | None = None
    bias_k: Tensor | None = None

    @property
    def token_groups(self) -> int:
        """Number of token groups (prefix, grid, suffix) with separate weights."""
        return max([1] + [t.shape[0] for t in self if t is not None and t.ndim == 3])


NO_WEIGHTS = Weights()


class Layout(NamedTuple):
    """Token counts and grid sizes, passed to the registered operators as SymInts."""

    num_tokens: int
    prefix: int
    num_grid_tokens: int  # product of sizes, or the number of explicit coords
    start: int
    sizes: tuple[int, ...]  # empty for explicit coords

    def is_same(self, other: Layout) -> bool:
        """Compare layouts field by field.

        If whole tuples are compared, Dynamo in torch 2.11 treats the sizes as constants.
        """
        has_same_counts = (
            self.num_tokens == other.num_tokens and self.prefix == other.prefix
            and self.num_grid_tokens == other.num_grid_tokens and self.start == other.start
        )  # fmt: skip
        has_same_axes = len(self.sizes) == len(other.sizes)
        return self is other or (
            has_same_counts and has_same_axes and all(a == b for a, b in zip(self.sizes, other.sizes, strict=True))
        )

    @property
    def ends(self) -> tuple[int, int]:
        """Return the number of prefix tokens and the number of suffix tokens."""
        num_tokens, prefix, num_grid, start, _ = self
        num_prefix = max(0, min(prefix - start, num_tokens))
        num_suffix = max(0, min(start + num_tokens - prefix - num_grid, num_tokens))
        return num_prefix, num_suffix

    def positions(self, tables: Tables, device: torch.device) -> tuple[Tensor, Any]:
        """Return positions (..., N, K) for the reference, and the mask of rotated tokens (None if all are rotated)."""
        if self.sizes:
            return grid_coordinates(
                self.num_tokens, self.sizes, self.prefix, self.start, tables.affine, tables.origin,
                device=device, dtype=torch.float64,
            )  # fmt: skip
        coords, rows = tables.coords, tables.rotated
        assert coords is not None
        coords = coords if coords.is_floating_point() else coords.double()
        suffix = self.num_tokens - self.prefix - self.num_grid_tokens
        if self.prefix == 0 and suffix == 0:
            return coords, rows
        pad = torch.nn.functional.pad
        if rows is None:
            rows = torch.ones(self.num_grid_tokens, dtype=torch.bool, device=device)
        return pad(coords, (0, 0, self.prefix, suffix)), pad(rows, (self.prefix, suffix))

    def scales(self, weights: Weights, device: torch.device) -> tuple[Scales, Scales]:
        """Return γ and β for q and for k, in the form that the reference expects."""
        groups = None
        if weights.weight is not None and weights.token_groups > 1:
            index = torch.arange(self.num_tokens, device=device) + (self.start - self.prefix)
            groups = (index >= 0).long() + (index >= self.num_grid_tokens).long()
            groups = groups.clamp_max(weights.token_groups - 1)
        return Scales(weights.weight, weights.bias, groups), Scales(weights.weight_k, weights.bias_k, groups)


class CallerTables(NamedTuple):
    """Tables of cos and sin that the caller passes instead of positions."""

    cos_sin: CosSin
    prefix: int | None  # if None, there is no prefix, and every token needs a row

    def lay_out(self, num_tokens: int) -> Layout:
        """Return the layout of ``num_tokens`` tokens. Prefix and suffix tokens have no rows in the tables."""
        return Layout(num_tokens, self.prefix or 0, self.cos_sin.shape[-2], 0, ())


class Needs(NamedTuple):
    """Flags for the gradients that a backward pass computes in addition to dx."""

    omega: bool = False
    phase: bool = False
    norm: bool = False  # γ and β, if they exist
    tables: bool = False  # the caller's cos and sin; only the reference computes this gradient


NO_NEEDS = Needs()


class Call(NamedTuple):
    """A validated call, without x."""

    spec: Spec
    layout: Layout
    tables: Tables
    # Launches prepared for calls with the same sizes, dtypes and devices. Keys contain the strides and the pass.
    launches: dict[Hashable, Any] | None = None
    weights: Weights = NO_WEIGHTS
    cos_sin: CosSin = NO_COS_SIN


class Variant(NamedTuple):
    """All compile-time settings of a kernel, as one value that is passed to every helper function.

    Compilers write the repr into generated code, so it must be valid code in any module.
    """

    # The computation: the fields of Spec.
    map: str = "cosine"
    act: str = "none"
    dim: int = 0
    pairs: str = "half"
    rotary_start: int = 0
    num_channels: int = 0
    sections: tuple[int, ...] = ()
    order: str = "cos_sin"
    norm: str = "none"
    norm_over: str = "head"
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    head_dim: int = 0
    num_axes: int = 0
    # The pass.
    backward: bool = False
    need_dangles: bool = False
    load_x: bool = True
    has_k: bool = False
    has_start: bool = False  # outputs begin at a token index that is read on the device
    # Positions.
    explicit: bool = False  # positions come from a table of coordinates
    by_sample: bool = False  # each sample has its own coordinates, origin or tables
    affine: bool = False
    has_origin: bool = False
    has_phase: bool = False
    # Cos and sin from the caller: see kernels/tables.py.
    tables: str = "none"  # | "pairs" | "full"
    joined: bool = False  # cos and sin are interleaved in memory
    inverse: bool = False  # sin is negated
    table_unit: int = 1  # if above 1: entries are adjacent, and strides are multiples of this, for aligned loads
    table_by_head: bool = False  # for a norm over all heads: heads, or groups of heads, have different entries
    # The norm.
    has_weight: bool = False
    has_bias: bool = False
    weight_by_head: bool = False  # each head has its own γ and β
    token_groups: int = 1  # each group has its own γ and β
    need_dweight: bool = False
    # Arithmetic.
    wide: bool = False  # compute in float64
    fast: bool = False  # use the hardware's sine and cosine
    fixed: bool = False  # count angles in integers
    functions: int = 0  # see kernels/activations.py
    # Memory.
    aligned: bool = False  # strides are in units of 8, and rows are 16-byte aligned
    long: bool = False  # some strides need more than 32 bits
    # A row's tiles: first the mapped channels, then those that pass through as x̄.
    num_mapped: int = 1
    begins: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    halves: int = 1  # number of row tiles per tile of the map; 2 for pairs
    num_map_tiles: int = 1
    map_tiles: tuple[Variant, ...] = ()  # if the map has several tiles, a variant for the channels of each tile
    first: int = 0  # first channel or pair of the tile that such a variant covers
    # The division of the work.
    block_r: int = 1  # rows (heads of samples)
    block_n: int = 1  # tokens
    block_c: int = 1  # channels (cosine) or pairs (rotate)
    flat: int = 0  # if nonzero: number of channel blocks per token. A tile then contains block_n channel blocks
    stages: int = 1
    early: bool = False  # this kernel and the one launched before or after it may run at the same time
    rows_first: bool = False  # frequencies are loaded after the rows
    # Linear attention.
    tokens_as_n: bool = False  # tokens are the columns of products, because Hopper's matrix units need at least 64 rows
    single_layout: bool = False  # all sums share a layout (causal, bfloat16, a single tile of at least 64 features)
    output_transposed: bool = False  # with single_layout, o of a block is computed with tokens as columns
    keeps_zero: bool = False  # act(0) is 0
    normalizer: str = "none"
    gated: bool = False
    need_dgate: bool = False
    operand: str = "same"  # operands keep their dtype | "bfloat16" | "rounded": float32 with bfloat16 values
    v_dim: int = 0
    v_begins: tuple[int, ...] = ()  # first channel of each tile of v
    v_widths: tuple[int, ...] = ()
    v_blocks: tuple[int, ...] = ()
    num_features: int = 0  # width of q̂ and k̂
    accumulate_outside_mma: bool = False  # products are summed outside the matrix units
    raw: bool = False  # features are the rows of q and k, unchanged
    share: int = 1  # number of tokens of a block that share a row of sums for dω
    run: int = 1  # number of adjacent channels from the same half in a tile of features
    feature_begins: tuple[int, ...] = ()  # first feature of each tile of features
    feature_widths: tuple[int, ...] = ()
    feature_blocks: tuple[int, ...] = ()
    sum_blocks: tuple[int, ...] = ()  # tiles of the normaliser's features
    sum_begins: tuple[int, ...] = (0,)  # first column of each of these tiles; the last entry is the number of columns
    # Other kernels compute the "unrotated" normaliser of each token (causal, without decay).
    has_normalizer_kernels: bool = False
    num_sums: int = 0
    state_size: int = 0  # elements of a head's S and Z
    causal: bool = False
    one_side: bool = False  # q and k share positions and phase
    has_no_gqa: bool = False  # q and k have the same number of heads
    has_state: bool = False  # the state of earlier tokens is loaded
    # The kernel's own update rule, which may differ from Attention.memory. In causal kernels, "add" means that there is
    # a decay. Scans multiply the state by I − A for "delta", but not for "add".
    memory: str = "sum"
    decay_per_head: bool = False  # in causal kernels, all tokens of a head have the same decay
    width: int = 0  # elements in a row of a state, which is split into tiles of block_c
    num_scans: int = 1  # 2 if both directions are scanned
    adds_first: bool = False  # the scan computes gradients
    need_ddecay: bool = False
    queries: Variant | None = None  # q's variant in a kernel that reads both sides; None if it equals k's

    def __repr__(self) -> str:
        fields = ", ".join(map(repr, self))
        return f"__import__({__name__!r}, fromlist=['_']).Variant({fields})"
