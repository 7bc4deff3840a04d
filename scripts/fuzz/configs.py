"""Configurations that contain all arguments of a call. You can paste the repr of a configuration into a test."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lrpe_md import Coordinates, Grid

SHARED = {  # layouts with zero strides, and the index of the part that is repeated
    "one sample": (slice(1),), "one head": (slice(None), slice(1)), "one number": (slice(1),) * 4,
}  # fmt: skip
PADDING = 16  # NaN elements before and after each input; a multiple of 16 keeps addresses aligned to 16 bytes


class _Small:
    """Base class whose repr only shows the fields that differ from their defaults."""

    def __repr__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}  # pyright: ignore
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


@dataclass(frozen=True, repr=False)
class Place(_Small):
    """Positions of tokens. A table has a row for each token of ``shape`` and a column for each axis."""

    kind: str = "grid"  # | "tensor" | "coordinates"
    shape: tuple[int, ...] = (3,)
    prefix: int = 0
    suffix: int = 0
    scale: tuple[float, ...] | None = None
    shift: tuple[float, ...] | None = None
    as_tensors: bool = False  # pass scale and shift as tensors
    start: int = 0
    length: int | None = None
    origin: bool = False
    by_sample: bool = False  # whether origin or coordinates differ across samples
    masked: bool = False  # some rows of coordinates are not rotated
    max_coordinate: float = 20.0  # largest coordinate or origin
    dtype: str = "float32"  # dtype of coordinates, or of an origin (int32 or int64)

    @property
    def num_tokens(self) -> int:
        total = self.prefix + math.prod(self.shape) + self.suffix
        return total - self.start if self.length is None else self.length


@dataclass(frozen=True, repr=False)
class NormConfig(_Small):
    """Norm of q and k."""

    kind: str = "rms"
    over: str = "head"
    weight: str = "none"  # | "shared" by the heads | "heads"
    groups: int = 1  # groups of tokens with separate weights
    bias: bool = False
    pair: bool = False  # separate weights for q and k
    offset: float = 0.0
    eps: float = 1e-6
    dtype: str = "float32"


@dataclass(frozen=True, repr=False)
class Config(_Small):
    """Fields shared by the maps and linear attention."""

    map: str | None = "rotate"
    dtype: str = "float32"
    batch: int = 1
    heads: tuple[int, int] = (1, 1)  # heads of q and of k
    head_dim: int = 4
    places: tuple[Place | None, ...] = (Place(),)  # one for both, or a pair for q and k
    act: str = "none"
    dim: int | None = None
    pairs: Any = "half"
    rotary_dim: Any = None
    order: str = "cos_sin"
    omega_heads: bool = False  # each key head has its own frequencies, phases and amplitudes
    omega_dtype: str = "float32"
    phase: str = "none"  # | "shared" | "pair" | "q" | "k"
    amplitude: str = "none"  # | "number" | "channels" | "heads"
    norm: NormConfig | None = None
    layout: str = "dense"  # memory layout of inputs; see arrange()
    grad_layout: str = "dense"
    zeros: bool = False  # some tokens are zero
    frozen: tuple[str, ...] = ()  # tensors that require no gradient
    is_repeated: bool = False  # repeat the call with the same sizes and other values
    seed: int = 0

    @property
    def place_q(self) -> Place | None:
        return self.places[0]

    @property
    def place_k(self) -> Place | None:
        return self.places[-1]

    @property
    def part(self) -> tuple[int, int]:
        """Return the first mapped channel and the number of mapped channels."""
        start, stop, _ = (self.rotary_dim if isinstance(self.rotary_dim, slice) else slice(self.rotary_dim)).indices(
            self.head_dim
        )
        return start, stop - start

    @property
    def channels(self) -> int:
        return {"cosine": self.part[1], "rotate": self.part[1] // 2, None: 0}[self.map]

    @property
    def num_axes(self) -> int:
        return len(self.place_q.shape) if self.place_q else 1


@dataclass(frozen=True, repr=False)
class LinearConfig(Config):
    """Configuration of a call to :func:`lrpe_md.linear_attention`."""

    v_dim: int = 4
    act: str = "relu"
    num_tokens: tuple[int, int] = (3, 3)  # without positions
    normalizer: str = "unrotated"
    mask: str = "full"
    block: int = 1
    gate: str = "none"  # | "float" | "zeros": some | "nan": some, where k and v are NaN | "bool" | "closed": all zeros
    gate_heads: bool = False
    gate_dtype: str = "float32"
    lengths: tuple[int, ...] | None = None  # lengths of packed sequences
    cu_dtype: str = "int32"
    state: bool = False
    return_state: bool = False
    gradient_of: str = "both"  # | "o" | "state"
    decay: str = "none"  # | "heads" | "one": for all heads | "blocks": per head | "shared": by samples and heads
    decay_dtype: str = "float32"
    rule: str = "add"
    directions: str = "forward"
    eps: float = 1e-6
    cut: str = "own"  # how programs divide the tokens; see patch_cuts() in run.py

    @property
    def tokens(self) -> tuple[int, int]:
        q, k = self.place_q, self.place_k
        return (q.num_tokens, k.num_tokens) if q and k else self.num_tokens

    @property
    def forgets(self) -> bool:
        """Return whether the call uses a decay, the delta rule or both directions."""
        return (self.decay, self.rule, self.directions) != ("none", "add", "forward")

    @property
    def has_kernels(self) -> bool:
        """Return whether kernels support this call."""
        return not self.forgets or (self.lengths is None and (self.mask == "causal" or self.block > 1))

    def count_blocks(self) -> int:
        """Return the number of blocks between prefix and suffix. With a causal mask, each token is a block."""
        num_tokens, place = self.tokens[0], self.place_q
        if self.mask == "causal":
            return num_tokens
        if place is None:
            return num_tokens // self.block
        start = place.start - place.prefix
        rows = math.prod(place.shape)
        return (min(start + num_tokens, rows) - min(max(start, 0), rows)) // self.block if start + num_tokens > 0 else 0

    @property
    def features(self) -> int:
        """Return the number of channels per head of q̂."""
        return self.head_dim + (self.part[1] if self.map == "cosine" else 0)


@dataclass(frozen=True, repr=False)
class MapConfig(Config):
    """Configuration of a call to :func:`lrpe_md.cosine` or :func:`lrpe_md.rotate`."""

    form: str = "one"  # tensor | "two": q and k | "qkv" | "stacked": qkv with num_key_heads
    samples: tuple[Place, ...] = ()  # positions of packed samples, instead of places
    flat: bool = False  # packed tokens have no batch dimension
    groups: int = 1  # groups of phases
    inverse: bool = False
    out: str = "none"  # | "slice" | "start" | "starts" | "first": only q
    length: int = 0  # additional rows of the cache

    @property
    def tokens(self) -> tuple[int, int]:
        if self.samples:
            total = sum(place.num_tokens for place in self.samples)
            return total, total
        assert self.place_q
        assert self.place_k
        return self.place_q.num_tokens, self.place_k.num_tokens


# --- positions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Where:
    """The same positions in two forms, for the library and for the formula."""

    positions: Any
    coords: Tensor  # (B or 1, N, K) float64
    on_grid: Tensor  # (B or 1, N): whether a token has an angle
    part: Tensor  # (N,): 0 prefix, 1 grid, 2 suffix
    index: Tensor  # (N,): a token's number on the grid


def locate(place: Place | None, num_tokens: int, batch: int, device: Any, generator: torch.Generator) -> Where:
    """Build a positions object for the library, and compute the same positions independently for the formula."""
    place = place or Place("none", (num_tokens,))
    rows, axes = math.prod(place.shape), len(place.shape)
    index = torch.arange(place.num_tokens) + place.start - place.prefix
    part = 1 - (index < 0).long() + (index >= rows).long()
    inside = index.clamp(0, max(rows - 1, 0))
    on_grid = (part == 1)[None]
    size = (batch,) if place.by_sample else ()
    if place.kind in ("grid", "none"):
        steps = [math.prod(place.shape[j + 1 :]) for j in range(axes)]
        cells = torch.stack(
            [inside // max(step, 1) % max(n, 1) for step, n in zip(steps, place.shape, strict=True)], -1
        )
        origin = torch.randint(
            -int(place.max_coordinate), int(place.max_coordinate) + 1, (*size, axes), generator=generator
        )
        origin = origin.int() if place.dtype == "int32" else origin
        at = cells + origin[..., None, :] if place.origin else cells
        scale, shift = (
            torch.tensor(given or (default,) * axes, dtype=torch.float64)
            for given, default in ((place.scale, 1.0), (place.shift, 0.0))
        )
        coords = at.double() * scale + shift
        positions: Any = None
        if place.kind == "grid":
            rules = (scale.to(device), shift.to(device)) if place.as_tensors else (place.scale, place.shift)
            positions = Grid(
                place.shape, place.prefix, place.suffix, *rules, place.start, place.length,
                pad(origin.to(device)) if place.origin else None,
            )  # fmt: skip
    else:
        table = torch.rand(*size, rows, axes, generator=generator).mul(2).sub(1).mul(place.max_coordinate)
        table = table.to(getattr(torch, place.dtype))
        rotated = torch.rand(*size, rows, generator=generator) < 0.6 if place.masked else None
        positions = pad(table.to(device))
        if place.kind == "coordinates":
            mask = None if rotated is None else rotated.to(device)
            positions = Coordinates(positions, place.prefix, place.suffix, mask)
        coords = table.double()[..., inside, :] if rows else torch.zeros(place.num_tokens, axes).double()
        if rotated is not None:
            on_grid = on_grid & (rotated[..., inside] if rows else on_grid)
    coords = coords if coords.ndim == 3 else coords[None]
    return Where(positions, coords.to(device), on_grid.to(device), part.to(device), index.to(device))


def join(samples: list[Where]) -> Where:
    """Concatenate samples along the tokens."""
    first, *_ = samples
    tables = [torch.cat([getattr(s, name) for s in samples], -1) for name in ("on_grid", "part", "index")]
    return Where(first.positions, torch.cat([s.coords for s in samples], 1), *tables)


# --- tensors --------------------------------------------------------------------------------------------------------


def pad(values: Tensor) -> Tensor:
    """Surround values with NaN (or a large number), to detect reads out of bounds."""
    fill = float("nan") if values.is_floating_point() else values.dtype == torch.bool or 1 << 20
    memory = values.new_full((values.numel() + 2 * PADDING,), fill)
    view = memory[PADDING : PADDING + values.numel()].view(values.shape)
    view.copy_(values)
    return view


def arrange(values: Tensor, layout: str) -> Tensor:
    """Copy values (B, H, N, D) to a memory layout, with NaN in the gaps."""
    b, h, n, d = values.shape
    if layout == "tokens first":
        return pad(values.transpose(1, 2)).transpose(1, 2)
    if layout == "packed":  # one of three tensors in a projection
        memory = values.new_full((b, n, 3, h, d), float("nan"))
        memory[:, :, 1] = values.transpose(1, 2)
        return memory[:, :, 1].transpose(1, 2)
    if layout == "channels first":
        return pad(values.transpose(2, 3)).transpose(2, 3)
    if layout == "odd":  # no stride is 1, and addresses are unaligned
        memory = values.new_full((n + 1, b, d, h, 3), float("nan"))
        view = memory[1:, :, :, :, 1].permute(1, 3, 0, 2)
        view.copy_(values)
        return view
    if layout in SHARED:
        return pad(values[SHARED[layout]]).expand(values.shape)
    return pad(values)


class Draws:
    """Random tensors for a configuration, which are the same on all devices."""

    def __init__(self, config: Config, device: Any) -> None:
        self.config, self.device = config, device
        self.generator = torch.Generator().manual_seed(config.seed)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator)

    def rows(self, *size: int, layout: str | None = None) -> Tensor:
        """Draw a tensor (B, H, N, D), for example q, k, v, an output's gradient or a cache."""
        values = self.normal(*size)
        if self.config.zeros:
            values = torch.where(self.uniform(*size[:3])[..., None] < 0.2, 0, values)
        return arrange(values.to(self.device, getattr(torch, self.config.dtype)), layout or self.config.layout)

    def table(self, values: Tensor) -> Tensor:
        """Lay out a parameter or a table in memory. With the layout "odd", the result is not contiguous."""
        values = values.to(self.device)
        return pad(values.mT).mT if self.config.layout == "odd" and values.ndim > 1 else pad(values)

    def locate(self, place: Place | None, num_tokens: int) -> Where:
        return locate(place, num_tokens, self.config.batch, self.device, self.generator)

    def frequencies(self, groups: int = 1) -> dict[str, Tensor]:
        """Draw omega, phase_q, phase_k and amplitude if the configuration uses them."""
        c = self.config
        heads, channels = c.heads[1] if c.omega_heads else 1, c.channels
        if c.map is None:
            return {}
        decay = 100.0 ** -(torch.arange(channels) / max(channels, 1))
        omega = self.normal(heads, channels, c.num_axes) * decay[:, None]
        tensors = {"omega": omega.to(getattr(torch, c.omega_dtype))}
        size = (heads, channels) if groups == 1 else (groups, heads, channels)
        names = {"none": (), "shared": ("phase_q",), "pair": ("phase_q", "phase_k"), "q": ("phase_q",)}
        for name in names.get(c.phase, ("phase_k",)):
            tensors[name] = self.normal(*size) * 2
        if c.amplitude != "none":
            forms = {"number": (), "channels": (channels,), "heads": (heads, channels)}
            tensors["amplitude"] = 1.5 + 0.5 * self.normal(*forms[c.amplitude])
        return {name: self.table(t) for name, t in tensors.items()}

    def norm_weights(self) -> dict[str, Tensor]:
        """Draw weight_q, weight_k, bias_q and bias_k if the configuration uses them."""
        c, tensors = self.config, {}
        if c.norm is None or c.norm.weight == "none":
            return {}
        for side, heads in zip("qk" if c.norm.pair else "q", c.heads, strict=False):
            size: tuple[int, ...] = (heads, c.head_dim) if c.norm.weight == "heads" else (c.head_dim,)
            if c.norm.groups > 1:
                size = (c.norm.groups, *(size if c.norm.weight == "heads" else (1, c.head_dim)))
            for name in ("weight", "bias")[: 1 + c.norm.bias]:
                values = self.normal(*size) * 0.5 + (name == "weight")
                tensors[f"{name}_{side}"] = self.table(values.to(getattr(torch, c.norm.dtype)))
        return tensors
