"""Launch grids, strides, allocation."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from ..positions.grid import affine_on, grid_coordinates
from . import kernels
from .boundary import Layout, Spec, Tables, accumulator, like_in_memory, strides_in_memory
from .plan import parts, plan

__all__ = ["INTERPRETING", "backward", "forward"]

lrpe_kernel: Any = kernels.lrpe_kernel
reduce_partial_kernel: Any = kernels.reduce_partial_kernel
softmax_sequence_kernel: Any = kernels.softmax_sequence_kernel

INTERPRETING = not isinstance(lrpe_kernel, triton.JITFunction)

MAX_AXES = 4  # of a grid inside the kernel; more axes go in as coordinates


class _Call(NamedTuple):
    """What forward and backward prepare alike: the arguments about positions and frequencies."""

    omega: Tensor
    phase: Tensor | None
    tables: Tables
    layout: Layout


def _positions(omega, phase, tables: Tables, layout: Layout) -> _Call:
    coords, affine, rotated, amplitude = tables
    if len(layout.sizes) > MAX_AXES:
        coords, _ = grid_coordinates(
            layout.num_grid_tokens, layout.sizes, 0, 0, affine, coords, device=omega.device, dtype=torch.float64
        )
        affine, layout = None, layout._replace(sizes=())
    if coords is not None:
        coords = _materialised(coords).contiguous()
    if rotated is not None:
        rotated = rotated.contiguous().view(torch.uint8)
    if amplitude is not None:
        amplitude = _materialised(amplitude).contiguous()
    phase = None if phase is None else _materialised(phase).contiguous()
    return _Call(_materialised(omega).contiguous(), phase, Tables(coords, affine, rotated, amplitude), layout)


def _materialised(t: Tensor) -> Tensor:
    """A kernel reads memory, which a lazily negated view has not changed."""
    return t.resolve_neg() if t.is_neg() else t


def _run(
    spec: Spec,
    call: _Call,
    xs: list[Tensor],
    dys: list[Tensor],
    stats: list[Tensor],
    theta: Tensor | None,
    load_theta: bool,
    need_dtheta: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Launch the kernel on q (and k); returns its outputs, and the partial sums for dω and dφ."""
    omega, phase, tables, layout = call
    coords, affine, rotated, amplitude = tables
    source, device = (dys or xs)[0], omega.device
    dtype = source.dtype
    if dys and spec.dim == -2:  # all of dx̄ is needed before any of dx: it waits in the accumulator's dtype
        dtype = accumulator(dtype)
    # Angles for the hardware's functions count up to 2^22 turns an axis: of 400 radians a position at these sizes.
    if coords is None and affine is None and max(layout.sizes) > 2**16 and _is_fast(dtype, need_dtheta):
        affine = affine_on((1.0,) * len(layout.sizes), (0.0,) * len(layout.sizes), device)
        tables = tables._replace(affine=affine)
    address, geometry = 0, []
    for t in xs:
        address |= t.data_ptr()
        geometry += t.shape, t.stride()
    for t in dys:
        address |= t.data_ptr()
        geometry += t.shape, t.stride()
    key = (
        spec, layout, dtype, len(xs), len(dys), *geometry, address % 16 == 0, omega.shape,
        0 if phase is None else phase.shape[0], 0 if amplitude is None else amplitude.shape[0],
        None if coords is None else coords.shape, rotated is None, affine is None, theta is None, load_theta,
        need_dtheta,
    )  # fmt: skip
    numbers = _known.get(key)
    if numbers is None:
        if len(_known) >= 4096:
            _known.clear()
        numbers = _known[key] = _numbers(
            spec, layout, dtype, xs, dys, address % 16 == 0, omega, phase, tables, theta, load_theta, need_dtheta
        )
    outs = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride in numbers.outs]
    partial = torch.empty(numbers.partial_shape, dtype=torch.float64, device=device) if need_dtheta else None
    if numbers.grid[0]:
        x0, x1 = (*xs, None, None)[:2]
        dy0, dy1 = (*dys, None, None)[:2]
        stat0, stat1 = (*stats, None, None)[:2]
        o0, o1 = (*outs, None)[:2]
        tensors = x0, dy0, o0, stat0, x1, dy1, o1, stat1, omega, phase, *tables, theta, partial
        _launch(numbers, source.dtype, tensors)
    return outs, partial


class _Numbers:
    """Everything about a launch but the tensors, and the kernels compiled for it."""

    __slots__ = ("compiled", "grid", "options", "outs", "partial_shape", "scalars")

    def __init__(
        self, programs: int, outs: list, partial_shape: tuple, scalars: tuple[int, ...], options: dict
    ) -> None:
        self.grid = (programs, 1, 1)
        self.outs = outs  # (size, stride) of each output
        self.partial_shape = partial_shape
        self.scalars = scalars
        self.options = options
        self.compiled: dict[Any, tuple[Any, tuple]] = {}


_known: dict[Any, _Numbers] = {}


def _launch(numbers: _Numbers, dtype: torch.dtype, tensors: tuple[Tensor | None, ...]) -> None:
    """``lrpe_kernel[grid](...)``, past Triton's search for the compiled kernel, which takes longer than the launch."""
    omega: Any = tensors[8]
    phase, coords, _, _, amplitude = tensors[9:14]
    # What chooses the kernel beside what _numbers is told.
    key = (
        dtype, omega.device, omega.dtype, phase is None or phase.dtype, coords is None or coords.dtype,
        amplitude is None or amplitude.dtype,
    )  # fmt: skip
    found = numbers.compiled.get(key)
    if found is not None and not lrpe_kernel.pre_run_hooks:
        compiled, constants = found
        compiled[numbers.grid](*tensors, *numbers.scalars, *constants)
        return
    compiled = lrpe_kernel[numbers.grid](*tensors, *numbers.scalars, **numbers.options)
    if isinstance(compiled, CompiledKernel):
        names = [name for name in lrpe_kernel.arg_names if name in numbers.options]
        numbers.compiled[key] = compiled, tuple(numbers.options[name] for name in names)


def _numbers(
    spec: Spec,
    layout: Layout,
    dtype: torch.dtype,
    xs: list[Tensor],
    dys: list[Tensor],
    aligned: bool,
    omega: Tensor,
    phase: Tensor | None,
    tables: Tables,
    theta: Tensor | None,
    load_theta: bool,
    need_dtheta: bool,
) -> _Numbers:
    """From shapes and strides alone. dtype: of the outputs; aligned: addresses are multiples of 16 bytes."""
    sources = dys or xs
    batch, heads0, num_tokens, last = sources[0].shape
    heads1 = sources[1].shape[1] if len(sources) == 2 else 0
    cosine = spec.map == "cosine"
    head_dim = last // 2 if cosine and dys else last
    out_dim = head_dim if dys else spec.out_dim(head_dim)
    outs = [((*t.shape[:3], out_dim), strides_in_memory(t, out_dim)) for t in sources]
    omega_heads, channels, num_axes = omega.shape
    coords, affine, rotated, amplitude = tables
    phase_heads, amplitude_heads = (0 if t is None else t.shape[0] for t in (phase, amplitude))
    groups = max(omega_heads, phase_heads, amplitude_heads, 1)
    group0, group1 = heads0 // groups, heads1 // groups
    by_sample = coords is not None and coords.ndim == 3
    block_c, flat = triton.next_power_of_2(channels), 0
    in_strides, dy_strides, out_strides = [x.stride() for x in xs], [dy.stride() for dy in dys], [o[1] for o in outs]
    every = [*in_strides, *dy_strides, *out_strides]
    aligned = aligned and _in_eights(head_dim, every)
    whole = cosine or 2 * channels == head_dim  # then channels is a multiple of 4, or of 8
    if aligned and whole and not spec.dim and channels < block_c and num_tokens * channels < 2**31:
        block_c = min(8, channels & -channels)
        flat = channels // block_c
    width = block_c if cosine else 2 * block_c
    tail = 0 if cosine else head_dim - spec.rotary_start - 2 * channels
    block_head = triton.next_power_of_2(spec.rotary_start) if spec.rotary_start else 0
    block_tail = triton.next_power_of_2(tail) if tail else 0
    if need_dtheta:  # what is not rotated waits with the rest
        width = triton.next_power_of_2(width + block_head + block_tail)
    span = (group0 + group1) * (1 if by_sample else batch)
    direction = "dtheta" if need_dtheta else "backward" if dys else "forward"
    if spec.act != "none":
        direction += " activated"
    num_rows = num_tokens * max(1, flat)
    heads, samples = group0 + group1, batch if by_sample else 1
    step = flat if flat and need_dtheta else 1  # each thread stays with its channels
    chosen = plan(
        spec.map, direction, num_rows, groups, span, heads, width, dtype.itemsize, samples, step, INTERPRETING
    )
    num_blocks = triton.cdiv(num_rows, chosen.block_n)
    token_programs = chosen.token_programs if num_blocks else 0
    in_sample, outer = parts(span, heads, chosen.per)
    programs = token_programs * groups * in_sample * outer * samples
    tokens_first = outs[0][1][2] <= outs[0][1][1]  # neighbours in memory run together
    first, second = token_programs, groups * in_sample
    first, second = (first, second) if tokens_first else (second, first)
    slots = num_axes + (phase_heads > 0)

    unit = 8 if aligned else 1
    numbers: dict[str, int] = {}
    for name, group in (("x", in_strides), ("dy", dy_strides), ("o", out_strides)):
        for k in range(2):
            b, h, n, d = group[k] if k < len(group) else (0, 0, 0, 0)
            numbers |= {
                f"{name}{k}_b": b // unit, f"{name}{k}_h": h // unit, f"{name}{k}_n": n // unit, f"{name}{k}_d": d
            }  # fmt: skip

    sizes = layout.sizes[::-1]  # fastest first: n1, n2, n3
    n1, n2, n3 = (*sizes, 1, 1, 1)[:3]
    numbers |= {
        "coords_b": coords.stride(0) if coords is not None and by_sample else 0,
        "omega_h": channels * num_axes if omega_heads > 1 else 0,
        "phase_h": channels if phase_heads > 1 else 0,
        "amplitude_h": channels if amplitude_heads > 1 else 0,
        "rotated_b": rotated.stride(0) if rotated is not None and by_sample else 0,
        "B": batch, "H0": heads0, "H1": heads1, "N": num_tokens,
        "prefix": layout.prefix, "num_grid": layout.num_grid_tokens, "start": layout.start,
        "n1": n1, "n2": n2, "n3": n3, "num_blocks": num_blocks, "tokens_first": int(tokens_first),
        "first": first, "second": second, "G": groups, "M": in_sample, "P": outer, "span": span, "per": chosen.per,
        "group0": group0, "group1": group1,
    }  # fmt: skip
    divisors = {
        "1": n1, "2": n2, "3": n3, "_first": first, "_second": second, "_g": groups, "_p": outer, "_h": group0 + group1
    }  # fmt: skip
    for name, divisor in divisors.items():
        numbers[f"magic{name}"], numbers[f"shift{name}"] = _magic(divisor)
    options = {
        "D": head_dim, "C": channels, "K": num_axes, "START": spec.rotary_start,
        "COSINE": cosine, "SIN_FIRST": spec.order == "sin_cos",
        "INTERLEAVED": spec.pairs == "interleaved", "SECTIONS": spec.sections, "ACT": spec.act, "DIM": spec.dim,
        "BACKWARD": bool(dys), "LOAD_X": bool(xs), "EXPLICIT": not layout.sizes, "BY_SAMPLE": by_sample,
        "AFFINE": affine is not None,
        "LOAD_THETA": load_theta, "STORE_THETA": theta is not None and not load_theta,
        "ALIGNED": aligned, "LONG": any(s // unit >= 2**31 for stride in every for s in stride),
        "WIDE": dtype == torch.float64,
        "FAST": _is_fast(dtype, need_dtheta), "PTX": _has_ptx(dtype),
        "BLOCK_R": chosen.block_r, "BLOCK_N": chosen.block_n, "BLOCK_C": block_c,
        "BLOCK_HEAD": block_head, "BLOCK_TAIL": block_tail,
        "FLAT": flat, "STAGES": chosen.stages, "EARLY": need_dtheta and _early(), "ROWS_FIRST": chosen.rows_first,
        "num_warps": chosen.num_warps, **_registers(chosen.max_registers),
    }  # fmt: skip
    scalars = tuple(numbers[name] for name in kernels.lrpe_kernel.arg_names if name in numbers)
    return _Numbers(programs, outs, (programs // groups, groups, slots, channels), scalars, options)


def _registers(most: int | None) -> dict[str, int]:
    """An option of Triton's CUDA compiler alone."""
    return {} if most is None or INTERPRETING or torch.version.hip is not None else {"maxnreg": most}


@lru_cache(maxsize=4096)
def _magic(n: int) -> tuple[int, int]:
    """32-bit (m, s) with o // n = (2o · m >> 32) >> s for 0 <= o < 2^31 (Granlund and Montgomery, PLDI 1994)."""
    bits = max(n - 1, 0).bit_length()
    return ((1 << (31 + bits)) // max(n, 1)) + 1, bits


def _aligned(head_dim: int, tensors: list[Tensor]) -> bool:
    """Every row starts at 16 bytes, and strides can be counted in units of 8 elements."""
    return all(t.data_ptr() % 16 == 0 for t in tensors) and _in_eights(head_dim, [t.stride() for t in tensors])


def _in_eights(head_dim: int, strides: list[tuple[int, ...]]) -> bool:
    return head_dim % 8 == 0 and all(d == 1 and (b | h | n) % 8 == 0 for b, h, n, d in strides)


def _is_fast(dtype: torch.dtype, need_dtheta: bool) -> bool:
    """CUDA's approximations of sin and cos are below the rounding of 16-bit outputs, but not of dω."""
    return dtype.itemsize == 2 and not need_dtheta and _has_ptx(dtype)


@cache
def _early() -> bool:
    """A kernel can be launched while the one before it runs, and wait for it.

    CUDA's programmatic dependent launch: from compute capability 9 on; graphs capture it since CUDA 12.3.
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


def _has_ptx(dtype: torch.dtype) -> bool:
    """CUDA's approximations of 2^x and 1/x can be used."""
    return dtype != torch.float64 and torch.version.hip is None and not INTERPRETING


def _softmax_sequence(x: Tensor, stat: Tensor, g: Tensor | None = None, dx: Tensor | None = None) -> None:
    if not x.numel():
        return
    batch, heads, num_tokens, head_dim = x.shape
    block_d = 16
    block_n = max(16, min(triton.next_power_of_2(num_tokens), 2048)) if INTERPRETING else 128
    tensors = [t for t in (x, g, dx) if t is not None]
    aligned = _aligned(head_dim, tensors)
    unit = 8 if aligned else 1
    strides = [x.stride(0) // unit, x.stride(1) // unit, x.stride(2) // unit, x.stride(3)]
    for t in (g, dx):
        strides += [0, 0, 0] if t is None else [s // unit for s in t.stride()[:3]]
    softmax_sequence_kernel[(batch * heads * triton.cdiv(head_dim, block_d),)](
        x, g, dx, stat, *strides, batch, heads, num_tokens,
        D=head_dim, ALIGNED=aligned, LONG=any(s // unit >= 2**31 for t in tensors for s in t.stride()),
        WIDE=x.dtype == torch.float64, PTX=_has_ptx(x.dtype), BLOCK_N=block_n, BLOCK_D=block_d,
    )  # fmt: skip


def forward(xs, omega, phase, tables: Tables, spec: Spec, layout: Layout, cache: bool) -> list[Tensor]:
    """See :func:`lrpe_md.ops.forward`."""
    xs = [_materialised(x) for x in xs]
    call = _positions(omega, phase, tables, layout)
    stats, theta = [], None
    with _on(xs[0]):
        if spec.dim == -2:
            for x in xs:
                stats.append(x.new_empty((2, x.shape[0], x.shape[1], x.shape[3]), dtype=accumulator(x.dtype)))
                _softmax_sequence(x, stats[-1])
        if cache:
            heads = max(t.shape[0] for t in (omega, phase, tables.amplitude) if t is not None)
            theta = omega.new_empty((heads, layout.num_tokens, spec.num_channels), dtype=torch.float32)
        outs, _ = _run(spec, call, xs, [], stats, theta, False, False)
    return [*outs, *stats, theta] if theta is not None else [*outs, *stats]


def backward(
    grads, xs, stats, omega, phase, tables: Tables, theta, spec: Spec, layout: Layout,
    need_omega: bool, need_phase: bool,
) -> list[Tensor]:  # fmt: skip
    """See :func:`lrpe_md.ops.backward`."""
    grads, xs = [_materialised(g) for g in grads], [_materialised(x) for x in xs]
    theta = None if theta is None else theta.contiguous()
    call = _positions(omega, phase, tables, layout)
    sequence = spec.dim == -2
    need_dtheta = need_omega or need_phase
    load = xs if need_dtheta or (spec.act != "none" and not sequence) else []
    with _on(grads[0]):
        inner = spec._replace(act="none") if sequence else spec
        dxs, partial = _run(inner, call, load, grads, stats, theta, theta is not None, need_dtheta)
        if sequence:
            dx_bars = dxs
            dxs = [like_in_memory(g, t.shape[3]) for g, t in zip(grads, dx_bars, strict=True)]
            for x, stat, dx_bar, dx in zip(xs, stats, dx_bars, dxs, strict=True):
                _softmax_sequence(x, stat, dx_bar, dx)
        if partial is not None:
            domega = torch.empty_like(call.omega) if need_omega else None
            dphase = torch.empty_like(call.phase) if need_phase and call.phase is not None else None
            _reduce(partial, domega, dphase, call)
            dxs += [t for t in (domega, dphase) if t is not None]
    return dxs


def _reduce(partial: Tensor, domega: Tensor | None, dphase: Tensor | None, call: _Call) -> None:
    rows, groups, slots, channels = partial.shape
    num_axes = call.omega.shape[2]
    omega_heads = 0 if domega is None else domega.shape[0]
    phase_heads = 0 if dphase is None else dphase.shape[0]
    # Few channels a program: shared frequencies have few sums, each over all programs of the first pass.
    block_c = max(4, triton.next_power_of_2(channels) // 2) if INTERPRETING else 4
    early = _early() and rows > 0  # behind a first pass
    reduce_partial_kernel[((omega_heads * num_axes + phase_heads) * triton.cdiv(channels, block_c),)](
        partial, domega, dphase, rows, groups, omega_heads, phase_heads,
        C=channels, K=num_axes, J=slots, EARLY=early, BLOCK_R=max(1, 4096 // block_c), BLOCK_C=block_c,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _on(x: Tensor):
    """Triton launches on the current device: make it x's."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device_of(x) if elsewhere else nullcontext()
