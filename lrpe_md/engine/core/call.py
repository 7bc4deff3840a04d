"""A call as one value: what the user asks for (:class:`Options`), checked and made into what everything below takes
(:class:`Call`); and what of it a kernel is compiled for (:class:`Variant`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...positions.coordinates import Coordinates
from ...positions.grid import Grid, grid_coordinates
from ...reference import Act, MapName, Scales, Spec

__all__ = [
    "NO_COS_SIN",
    "NO_TABLES",
    "NO_WEIGHTS",
    "Act",
    "Call",
    "CosSin",
    "GivenTables",
    "Impl",
    "Layout",
    "MapName",
    "Needs",
    "NormOptions",
    "Options",
    "Order",
    "Pairs",
    "Positions",
    "Scales",
    "Spec",
    "Tables",
    "Variant",
    "Weights",
]  # fmt: skip

Impl = Literal["auto", "triton", "reference"]
Pairs = Literal["half", "interleaved"] | Sequence[int]
Order = Literal["cos_sin", "sin_cos"]
Positions = Grid | Coordinates | Tensor


class NormOptions(NamedTuple):
    """Non-tensor fields of a :class:`lrpe_md.Norm`."""

    kind: str
    over: str
    eps: float
    offset: float


class Options(NamedTuple):
    """The user's choices, as passed, without tensors and positions."""

    map: MapName
    act: Act = "none"
    dim: int | None = None
    pairs: Pairs = "half"
    rotary_dim: int | slice | None = None
    order: Order = "cos_sin"
    impl: Impl = "auto"
    norm: NormOptions | None = None


class Tables(NamedTuple):
    """Tensors beside x. The kernels give a gradient to omega and phase alone."""

    omega: Any  # (H or 1, C, K); None where cos and sin are given
    phase: Tensor | None = None  # (H or 1, C)
    coords: Tensor | None = None  # (N, K) or (B, N, K) without prefix and suffix
    origin: Tensor | None = None  # of a grid: (1, K) or (B, 1, K)
    affine: Tensor | None = None  # of a grid: scale and shift (K, 2)
    rotated: Tensor | None = None  # (N,) or (B, N) as coords: whether a row is rotated
    amplitude: Tensor | None = None  # (H or 1, C)


NO_TABLES = Tables(None)


class CosSin(NamedTuple):
    """Given cos and sin, which stand in place of angles: (N, W), (B or 1, N, W) or (B or 1, H or 1, N, W).

    W is the number of channels of the cosine map; of a rotation it is the number of pairs, or twice that, an entry for
    each channel.
    """

    cos: Tensor | None = None  # without sin (.., W, 2): cos and sin side by side
    sin: Tensor | None = None
    inverse: bool = False  # sin is negated

    @property
    def shape(self) -> torch.Size:
        """The shape of cos and of sin."""
        assert self.cos is not None
        return self.cos.shape if self.sin is not None else self.cos.shape[:-1]

    @property
    def given(self) -> tuple[Tensor, ...]:
        """The tensors that there are."""
        return tuple(t for t in self[:2] if t is not None)

    def strides(self) -> tuple[tuple[int, int, int, int], ...]:
        """Return the strides (b, h, n, d) of cos and of sin, 0 where samples or heads share their rows."""
        found = []
        for t in self.given:
            *outer, rows, entries = t.stride()[: len(self.shape)]
            steps = [step if size > 1 else 0 for step, size in zip(outer, self.shape, strict=False)]
            batch, heads = {0: (0, 0), 1: (*steps, 0)}.get(len(steps), tuple(steps))
            found.append((batch, heads, rows, entries))
        return tuple(found)

    @property
    def num_heads(self) -> int:
        """Heads that have rows of their own; 1 where all share them."""
        return self.shape[1] if any(heads for _, heads, _, _ in self.strides()) else 1

    @property
    def by_sample(self) -> bool:
        """True if each sample has its own rows."""
        return any(batch for batch, _, _, _ in self.strides())

    def split(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin as the formula has them, as views where nothing is negated."""
        assert self.cos is not None
        cos, sin = self.cos.unbind(-1) if self.sin is None else (self.cos, self.sin)
        return cos, -sin if self.inverse else sin


NO_COS_SIN = CosSin()


class Weights(NamedTuple):
    """γ and β of the norm of q, or of one tensor, and of k: (D,), (H, D) or (P, 1 or H, D) each."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    weight_k: Tensor | None = None
    bias_k: Tensor | None = None

    @property
    def token_groups(self) -> int:
        """P: groups of tokens, of the prefix, the grid and the suffix, that differ."""
        return max([1] + [t.shape[0] for t in self if t is not None and t.ndim == 3])


NO_WEIGHTS = Weights()


class Layout(NamedTuple):
    """Token counts and grid sizes: integers that cross the operator boundary as SymInts."""

    num_tokens: int
    prefix: int
    num_grid_tokens: int  # Π sizes, or the rows of explicit coords
    start: int
    sizes: tuple[int, ...]  # empty for explicit coords

    def is_same(self, other: Layout) -> bool:
        """Field by field: dynamo of torch 2.11 takes the sizes in a tuple that is compared for constants."""
        counts = (
            self.num_tokens == other.num_tokens and self.prefix == other.prefix
            and self.num_grid_tokens == other.num_grid_tokens and self.start == other.start
        )  # fmt: skip
        alike = len(self.sizes) == len(other.sizes)
        return self is other or (counts and alike and all(a == b for a, b in zip(self.sizes, other.sizes, strict=True)))

    @property
    def ends(self) -> tuple[int, int]:
        """Count the prefix and suffix tokens."""
        num_tokens, prefix, num_grid, start, _ = self
        before = max(0, min(prefix - start, num_tokens))
        after = max(0, min(start + num_tokens - prefix - num_grid, num_tokens))
        return before, after

    def positions(self, tables: Tables, device: torch.device) -> tuple[Tensor, Any]:
        """Positions (.., N, K) and the mask of rotated tokens (None where all are), for the reference."""
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
        """γ and β of q and of k for the reference."""
        groups = None
        if weights.weight is not None and weights.token_groups > 1:
            index = torch.arange(self.num_tokens, device=device) + (self.start - self.prefix)
            groups = (index >= 0).long() + (index >= self.num_grid_tokens).long()
            groups = groups.clamp_max(weights.token_groups - 1)
        return Scales(weights.weight, weights.bias, groups), Scales(weights.weight_k, weights.bias_k, groups)


class GivenTables(NamedTuple):
    """Tables as they were given. They stand where a call otherwise has its positions."""

    cos_sin: CosSin
    prefix: int

    def lay_out(self, num_tokens: int) -> Layout:
        """Return where the tables' rows are among so many tokens."""
        return Layout(num_tokens, self.prefix, self.cos_sin.shape[-2], 0, ())


class Needs(NamedTuple):
    """Gradients that a backward forms in addition to dx."""

    omega: bool = False
    phase: bool = False
    norm: bool = False  # all of γ and β that there are
    tables: bool = False  # given cos and sin, by the reference: the kernels form no such gradient


class Call(NamedTuple):
    """A checked call, all of it but x."""

    spec: Spec
    layout: Layout
    tables: Tables
    # What was prepared for calls of the same sizes, dtypes and devices: by the strides and the pass, a launch.
    launches: dict[Hashable, Any] | None = None
    weights: Weights = NO_WEIGHTS
    cos_sin: CosSin = NO_COS_SIN


class Variant(NamedTuple):
    """Everything that a kernel is compiled for, as one value that every helper takes.

    Its repr can be evaluated anywhere, because code that a compiler generates contains it.

    """

    # What is computed: the fields of Spec.
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
    has_start: bool = False  # an output begins at a place of its tensor that is read on the device
    # Positions.
    explicit: bool = False  # from a table of coordinates
    by_sample: bool = False  # each sample has coordinates, an origin or tables of its own
    affine: bool = False
    has_origin: bool = False
    has_phase: bool = False
    # Given cos and sin: see kernels/tables.py.
    tables: str = "none"  # | "pairs" | "full"
    joined: bool = False  # cos and sin are side by side
    inverse: bool = False  # sin is negated
    table_unit: int = 1  # what strides are multiples of, where entries are side by side and rows aligned as their loads
    # The norm.
    has_weight: bool = False
    has_bias: bool = False
    weight_by_head: bool = False  # γ and β of a head of their own
    token_groups: int = 1  # of which each has γ and β of its own
    need_dweight: bool = False
    # Arithmetic.
    wide: bool = False  # float64
    fast: bool = False  # the hardware's sine and cosine
    fixed: bool = False  # angles counted in integers
    functions: int = 0  # see kernels/activations.py
    # Memory.
    aligned: bool = False  # strides in units of 8, rows at multiples of 16 bytes
    long: bool = False  # strides beyond 32 bits
    # A row's tiles: first what the map turns, then what passes as x̄.
    num_turned: int = 1
    begins: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    halves: int = 1  # tiles of a row that the map makes one tile of: two of pairs
    num_map_tiles: int = 1  # that it makes
    map_tiles: tuple[Variant, ...] = ()  # of several, each as a variant that has its channels alone
    first: int = 0  # channel or pair at which such a tile begins
    # How the work is cut.
    block_r: int = 1  # rows (heads of samples)
    block_n: int = 1  # tokens
    block_c: int = 1  # channels (cosine) or pairs (rotate)
    flat: int = 0  # not 0: blocks of channels, and tiles have block_n of all the tokens' blocks
    stages: int = 1
    early: bool = False  # the second pass of dω may be launched as soon as all programs of this one run
    rows_first: bool = False  # frequencies are read after the rows
    # Linear attention.
    tokens_as_n: bool = False  # products have tokens as columns: fewer than 64 can't be rows on Hopper
    single_layout: bool = False  # causal, bfloat16, one tile of at least 64 features: all sums share a layout
    output_transposed: bool = False  # with single_layout: o of a block is formed with tokens as columns
    keeps_zero: bool = False  # act(0) is 0
    normalizer: str = "none"
    gated: bool = False
    need_dgate: bool = False
    operand: str = "same"  # what matrix units multiply | "bfloat16" | "rounded" to that, for an interpreter that can't
    v_dim: int = 0
    v_begins: tuple[int, ...] = ()  # of the tiles of v
    v_widths: tuple[int, ...] = ()
    v_blocks: tuple[int, ...] = ()
    num_features: int = 0  # of q̂ and k̂
    accumulate_outside_mma: bool = False  # products are summed up outside of the matrix units
    raw: bool = False  # features are rows as they lie in memory
    share: int = 1  # tokens of a block that have a row of sums for dω in common
    run: int = 1  # channels of a half side by side in a tile of features
    feature_begins: tuple[int, ...] = ()  # of their tiles, in the order of the tiles
    feature_widths: tuple[int, ...] = ()
    feature_blocks: tuple[int, ...] = ()
    sum_blocks: tuple[int, ...] = ()  # of the tiles of what the normaliser sums up over tokens
    num_sums: int = 0
    state_size: int = 0  # of S and these, of a head
    causal: bool = False
    one_side: bool = False  # of q and k, which have positions and phase in common
    has_no_gqa: bool = False  # a head of q for each head of k
    has_state: bool = False  # of tokens before these
    # Not Attention.memory. Causal kernels: "add" with a decay. Scans: "delta" multiplies by I − A, "add" does not.
    memory: str = "sum"
    width: int = 0  # of a row of a state, in tiles of block_c
    num_scans: int = 1  # 2 in both directions
    adds_first: bool = False  # a scan of gradients
    need_ddecay: bool = False
    queries: Variant | None = None  # of q's side, in a kernel that takes both sides; None: the same as of k's

    def __repr__(self) -> str:
        fields = ", ".join(map(repr, self))
        return f"__import__({__name__!r}, fromlist=['_']).Variant({fields})"
