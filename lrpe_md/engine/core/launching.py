"""Helpers that all launchers use to prepare tables, describe grids as numbers, and detect GPU features."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...positions.grid import affine_on, grid_coordinates
from .. import kernels
from ..kernels.signature import LONG_STRIDE, pack_numbers, pack_strides
from .call import Call, Layout, Spec, Tables, Variant, Weights
from .recording import is_recording

INTERPRETING = not isinstance(kernels.lrpe_kernel, triton.JITFunction)

MAX_AXES = 4  # maximum number of grid axes in a kernel; grids with more axes are passed as coordinates
LARGE_GRID = 2**16  # tokens along an axis; larger grids may need use_affine_positions
MAX_INDEX = 2**31 - 1  # largest token index in a kernel; shards of larger grids are passed as coordinates


def make_readable(call: Call) -> Call:
    """Return a copy of the call with tables that kernels can read.

    Tables are made contiguous. A grid with more than MAX_AXES axes or MAX_INDEX tokens is replaced by coordinates.
    """
    omega, phase, coords, origin, affine, rotated, amplitude = call.tables
    layout, weights, cos_sin = call.layout, call.weights, call.cos_sin
    cos, sin, _ = cos_sin
    if (cos is not None and cos.is_neg()) or (sin is not None and sin.is_neg()):
        cos, sin = materialise(cos, sin)
        call = call._replace(cos_sin=cos_sin._replace(cos=cos, sin=sin))
    if call.spec.norm != "none":
        weights = lay_weights(weights)
    if omega is None:
        return call if weights is call.weights else call._replace(weights=weights)
    if max(layout.num_grid_tokens, layout.start + layout.num_tokens) > MAX_INDEX:
        if call.weights.token_groups > 1:
            raise ValueError(
                "norm.weight: expected one weight for all tokens of a grid with 2^31 or more tokens, got one per group"
            )
        coords, rotated = layout.positions(call.tables, omega.device)
        rotated = rotated.expand(coords.shape[:-1])
        affine, origin, layout = None, None, Layout(layout.num_tokens, 0, layout.num_tokens, 0, ())
    elif len(layout.sizes) > MAX_AXES:
        coords, _ = grid_coordinates(
            layout.num_grid_tokens, layout.sizes, 0, 0, affine, origin, device=omega.device, dtype=torch.float64
        )
        affine, origin, layout = None, None, layout._replace(sizes=())
    elif rotated is None and all(map(_is_readable, (omega, phase, coords, origin, amplitude))):
        return call if weights is call.weights else call._replace(weights=weights)
    if rotated is not None:
        rotated = rotated.contiguous().view(torch.uint8)
    omega, phase, coords, origin, amplitude = (
        None if t is None else t.contiguous() for t in materialise(omega, phase, coords, origin, amplitude)
    )
    tables = Tables(omega, phase, coords, origin, affine, rotated, amplitude)
    return call._replace(layout=layout, tables=tables, weights=weights)


def _is_readable(t: Tensor | None) -> bool:
    return t is None or (t.is_contiguous() and not t.is_neg())


def read_side(spec: Spec, layout: Layout, tables: Tables, narrow: bool) -> Call:
    """Describe q or k of linear attention in a form that kernels can read. Set ``narrow`` for 16-bit inputs."""
    side = Call(spec, layout, tables)
    if spec.map == "none":
        return side
    # For 16-bit inputs, kernels use the hardware's sine and cosine.
    return make_readable(use_affine_positions(side) if narrow else side)


def lay_weights(weights: Weights) -> Weights:
    """Return γ and β as contiguous tensors in the shape that kernels expect, (H or 1, P, D)."""

    def lay_out(t: Tensor) -> Tensor:
        t = t.detach().resolve_neg()
        return (t.transpose(0, 1) if t.ndim == 3 else t.reshape(-1, 1, t.shape[-1])).contiguous()

    return Weights(*(None if t is None else lay_out(t) for t in weights))


def materialise(*tensors: Tensor | None) -> list[Any]:
    """Resolve negative bits that are set. Kernels read memory directly, so they would ignore these bits."""
    return [t if t is None or not t.is_neg() else t.resolve_neg() for t in tensors]


def use_affine_positions(call: Call) -> Call:
    """Return a copy of the call in which the positions of a large grid are an affine function of the indices.

    Otherwise, kernels that use the hardware's sine and cosine could count only 2^22 turns per axis. On an axis of
    LARGE_GRID tokens, this would limit frequencies to 400 radians per position.
    """
    layout, tables = call.layout, call.tables
    if max(layout.sizes, default=0) <= LARGE_GRID or tables.affine is not None or tables.origin is not None:
        return call
    num_axes = len(layout.sizes)
    affine = affine_on((1.0,) * num_axes, (0.0,) * num_axes, tables.omega.device)
    return call._replace(tables=tables._replace(affine=affine))


def num_groups(call: Call) -> int:
    """Return the number of groups of heads. The heads of a group share frequencies or rows of tables."""
    tables = call.tables
    heads = [t.shape[0] for t in (tables.omega, tables.phase, tables.amplitude) if t is not None]
    return max(*heads, 1 if call.cos_sin.cos is None else call.cos_sin.num_heads, 0)


class Tiles(NamedTuple):
    """Tiles of a row. The mapped channels come first, followed by the unmapped ones."""

    block_c: int
    num_mapped: int
    begins: tuple[int, ...]
    widths: tuple[int, ...]
    blocks: tuple[int, ...]
    halves: int = 1  # number of row tiles per tile of the map
    num_map_tiles: int = 1

    @property
    def feature_widths(self) -> tuple[int, ...]:
        return self._join(self.widths)

    @property
    def feature_blocks(self) -> tuple[int, ...]:
        return self._join(self.blocks)

    def _join(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tile widths of features, where each tile contains both halves of the map's output."""
        mapped = widths[: self.num_mapped : self.halves]
        return (*(2 * width for width in mapped), *widths[self.num_mapped :])


class Segment(NamedTuple):
    """A tile of channels."""

    begin: int
    width: int  # number of channels, without padding
    block: int


def pad_channels(width: int) -> tuple[int, ...]:
    """Return the width of a single tile for ``width`` channels: the next power of two."""
    return (triton.next_power_of_2(width),)


def cut_width(begin: int, width: int, choose: Callable[[int], tuple[int, ...]] = pad_channels) -> list[Segment]:
    """Split ``width`` channels into tiles. ``choose(width)`` returns the widths of the tiles."""
    blocks = choose(width)
    offsets = accumulate(blocks, initial=0)
    return [
        Segment(begin + offset, min(block, width - offset), block)
        for offset, block in zip(offsets, blocks, strict=False)
    ]


def cut_channels(
    spec: Spec,
    head_dim: int,
    choose: Callable[[int], tuple[int, ...]] = pad_channels,
    pad: Callable[[int], tuple[int, ...]] = pad_channels,
) -> Tiles:
    """Split a row into tiles.

    ``choose`` returns the tile widths for the mapped channels, and ``pad`` for the other channels.
    """
    channels = spec.num_channels
    if spec.map == "none" and not channels:
        tiles = cut_width(0, head_dim, choose)
        begins, widths, blocks = zip(*tiles, strict=True)
        return Tiles(tiles[0].block, 0, begins, widths, blocks)
    halves = 1 if spec.map == "cosine" else 2
    head, tail = spec.rotary_start, spec.rotary_start + halves * channels
    mapped = cut_width(head, channels, choose)
    tiles = [tile._replace(begin=tile.begin + half * channels) for tile in mapped for half in range(halves)]
    num_mapped = len(tiles)
    for begin, end in ((0, head), (tail, head_dim)):
        if end > begin:
            tiles += cut_width(begin, end - begin, pad)
    begins, widths, blocks = zip(*tiles, strict=True)
    return Tiles(mapped[0].block, num_mapped, begins, widths, blocks, halves, len(mapped))


def describe_tables(tables: Tables, weights: Weights) -> dict[str, Any]:
    """Return the fields of a variant that tell kernels which tables and weights exist."""
    scales = [t for t in weights if t is not None]
    return {
        "num_axes": 0 if tables.omega is None else tables.omega.shape[2],
        "explicit": tables.coords is not None, "affine": tables.affine is not None,
        "by_sample": tables.by_sample,
        "has_origin": tables.origin is not None, "has_phase": tables.phase is not None,
        "has_weight": weights.weight is not None, "has_bias": weights.bias is not None,
        "weight_by_head": any(t.shape[0] > 1 for t in scales),
        "token_groups": scales[0].shape[1] if scales else 1,
    }  # fmt: skip


def pack_side(side: Call, variant: Variant) -> tuple[tuple[int, ...], ...]:
    """Return packed numbers for q or k: the strides of the tables, and the numbers that describe the grid."""
    return pack_numbers(*find_table_strides(side, variant)), pack_grid(side.layout)


def count_tokens(layout: Layout) -> tuple[int, int, int]:
    """Return the number of tokens, the grid index of token 0 (negative with a prefix), and the grid's size."""
    return layout.num_tokens, layout.start - layout.prefix, layout.num_grid_tokens


def find_table_strides(call: Call, variant: Variant) -> tuple[int, int, int, int, int]:
    """Return the strides of ω, φ and amplitudes along heads, and those of positions and the mask along samples.

    A stride is 0 if all heads (or samples) share the table.
    """
    omega, phase, coords, origin, _, rotated, amplitude = call.tables
    positions = coords if coords is not None else origin
    channels = variant.num_channels

    def step(t: Tensor | None, size: int) -> int:
        return size if t is not None and t.shape[0] > 1 else 0

    return (
        step(omega, channels * variant.num_axes), step(phase, channels), step(amplitude, channels),
        positions.stride(0) if positions is not None and call.tables.by_sample else 0,
        rotated.stride(0) if rotated is not None and rotated.ndim == 2 else 0,
    )  # fmt: skip


def pack_grid(layout: Layout) -> tuple[int, ...]:
    """Return the packed sizes of three axes, fastest first, and the magic numbers and shifts used to divide by them."""
    sizes = (*layout.sizes[::-1], 1, 1, 1)[:3]
    magics, shifts = zip(*map(find_magic, sizes), strict=True)
    return pack_numbers(*sizes, *magics, *shifts)


@lru_cache(maxsize=4096)
def find_magic(n: int) -> tuple[int, int]:
    """Find 32-bit (m, s) with o // n = (2o · m >> 32) >> s for 0 <= o < 2^31 (Granlund and Montgomery, PLDI 1994)."""
    bits = max(n - 1, 0).bit_length()
    return ((1 << (31 + bits)) // max(n, 1)) + 1, bits


def limit_registers(max_registers: int | None) -> dict[str, int]:
    """Return the compiler option for a register limit. Only Triton's CUDA backend has this option."""
    return {} if max_registers is None or INTERPRETING or torch.version.hip is not None else {"maxnreg": max_registers}


def in_eights(head_dim: int, strides: list[tuple[int, ...]]) -> bool:
    return head_dim % 8 == 0 and all(map(strides_in_eights, strides))


def strides_in_eights(stride: tuple[int, ...]) -> bool:
    """Return whether the channels of (B, H, N, D) are adjacent and all other strides are divisible by 8."""
    b, h, n, d = stride
    return d == 1 and (b | h | n) % 8 == 0


def are_long(strides: Sequence[tuple[int, ...]], unit: int) -> bool:
    """Return whether a stride in units of ``unit`` elements needs int64."""
    return any(step // unit >= LONG_STRIDE for stride in strides for step in stride)


@lru_cache(maxsize=4096)
def pack_stride(stride: tuple[int, ...], aligned: bool, long: bool) -> tuple[int, ...]:
    """Return the packed strides of a tensor. If ``aligned`` is set, divide all but the channel stride by 8."""
    unit, (*steps, last) = 8 if aligned else 1, stride
    return pack_strides(long, *(step // unit for step in steps), last)


@cache
def _can_launch_early() -> bool:
    """Return whether a kernel can be launched early, while the previous kernel is still running.

    This feature is called programmatic dependent launch. It needs compute capability 9 and, for CUDA graphs, CUDA 12.3.
    """
    if INTERPRETING or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    driver = ctypes.c_int()
    try:
        ctypes.CDLL("nvcuda" if sys.platform == "win32" else "libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    except OSError:
        return False
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return driver.value >= 12030 and min(capabilities) >= (9, 0)


def launches_early() -> bool:
    """Return whether a kernel may be launched while the previous kernel is still running."""
    return not is_recording() and _can_launch_early()


def has_ptx(dtype: torch.dtype) -> bool:
    """Return whether CUDA's approximations of 2^x and 1/x can be used."""
    return dtype != torch.float64 and torch.version.hip is None and not INTERPRETING


def current_device(x: Tensor):
    """Return a context that makes x's device current, because Triton launches kernels on the current device."""
    needs_switch = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device_of(x) if needs_switch else nullcontext()
