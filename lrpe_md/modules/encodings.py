"""Encodings as modules that store their frequencies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks import check_dense, check_frequencies, plural, rotary_slice, warn_caller
from ..engine.core.call import Act, Impl, Pairs, Positions
from ..engine.encode.validate import WHOLE_PACK, check_input, check_pairs
from ..engine.encode.views import Packed, encode_packed, encode_qkv, unpack_positions
from ..frequencies.axial import AxisOrder, sequence_omega
from ..norm import Norm
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..positions.sequences import text_positions
from ..presets.registry import preset as make_preset
from ..presets.scheme import Axial, Preset, Scheme
from .base import (
    Frequencies,
    FrequencyModule,
    Learnable,
    Phase,
    SeriesModule,
    check_broadcast,
    multiply_in_own_dtype,
    warn_of_shared_heads,
)
from .xpos import check_scale, scale_xpos

__all__ = ["CosineMd", "PresetMd", "Rotate1d", "RotateMd"]


class CosineMd(SeriesModule):
    """Apply :func:`lrpe_md.cosine` to q and k (B, H, N, D) with the module's own frequencies.

    Each result is (B, H, N, 2D).

    Args:
        head_dim: number of channels per head, D.
        num_axes: K, the number of axes of the grid.
        base: base of the geometric series. The default is 10000, or 10 for "mixed" as in RoPE-ViT (arXiv 2403.13298).
        frequencies: "axial" (one block of channels per axis), "mixed" (dense, with random directions for each head), or
            a function (channels, num_heads, seed) -> omega (1 or num_heads, channels, K). With a function, base and
            axis_order are ignored.
        num_heads: number of key heads, or 1 to share the frequencies among all heads.
        learnable: if True, learn the logarithm of theta (for axial frequencies) or omega (for all others). "raw" learns
            theta itself. Axial frequencies share a single theta for all axes. To learn each axis separately, use
            ``PresetMd(Scheme(..., Axial((1, 1)), map="cosine"), learnable=True)``, or omit ``map`` to rotate. If False,
            the frequencies are a fixed buffer.
        axis_order: which axis gets the first block of channels; see :func:`lrpe_md.axial_omega`. :class:`RotateMd`
            lists the conventions of known models.
        rotary_dim, act, dim, impl: see :func:`lrpe_md.cosine`.
        phase: if True, learn a phase (num_heads, D) for q and k, initially zero. "k" applies the phase to the keys only
            (PoPE).
        phase_groups: number P of phases to learn, as (P, num_heads, D). If P > 1, the phases of group g are initially π
            g / P. :func:`lrpe_md.cosine` explains the purpose and cost of groups.
        seed: seed of the random directions.
        dtype: dtype of the frequencies, float32 or float64. Casting the model does not change this dtype.

    Call with ``module(x, positions=grid)`` or ``module(q, k, positions=grid)``.
    """

    map = "cosine"


class RotateMd(SeriesModule):
    """Apply :func:`lrpe_md.rotate` to q and k (B, H, N, D) with the module's own frequencies.

    Choose ``pairs`` and ``axis_order`` first. Any choice trains equally well from scratch, but published weights and
    existing code require a specific one:

    | convention of                                        | ``pairs``     | ``axis_order`` |
    | ---------------------------------------------------- | ------------- | -------------- |
    | the defaults here                                    | "half"        | "minor_first"  |
    | the LRPE document                                    |               | "minor_first"  |
    | Llama, Qwen and most transformers text models        | "half"        |                |
    | RoFormer, GPT-J, the LLaMA release of Meta           | "interleaved" |                |
    | EVA-02 (timm), FLUX, Wan, HunyuanVideo, CogVideoX    | "interleaved" | "major_first"  |
    | RoPE-ViT, Perception Encoder, Llama 4's vision tower | "interleaved" | "minor_first"  |
    | DINOv3, Cosmos, GLM-Image                            | "half"        | "major_first"  |

    "minor_first" assigns the first block of channels to the last axis of the grid (columns), and "major_first" assigns
    it to the first axis. :class:`PresetMd` sets ``pairs``, ``axis_order`` and the base to match a named model. Your own
    :class:`lrpe_md.Scheme` has the opposite defaults, "interleaved" and "major_first".

    The arguments are the same as for :class:`CosineMd`, except for these:

    Args:
        pairs, rotary_dim: see :func:`lrpe_md.rotate`.
        phase: if True, learn a phase (num_heads, R/2) for q and k, initially zero. "k" applies the phase to the keys
            only.
        amplitude: factor by which to multiply the rotated channels (YaRN, LongRoPE), a number or a tensor (R/2,). None
            means 1.
    """

    map = "rotate"

    def __init__(
        self,
        head_dim: int,
        num_axes: int = 2,
        *,
        base: float | None = None,
        frequencies: Frequencies = "axial",
        num_heads: int = 1,
        learnable: Learnable = False,
        axis_order: AxisOrder = "minor_first",
        pairs: Pairs = "half",
        rotary_dim: int | slice | None = None,
        act: Act = "none",
        dim: int | None = None,
        phase: Phase = False,
        seed: int = 0,
        amplitude: float | Tensor | None = None,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.pairs: Pairs = pairs
        super().__init__(
            head_dim, num_axes, num_heads=num_heads, rotary_dim=rotary_dim, frequencies=frequencies, base=base,
            learnable=learnable, axis_order=axis_order, phase=phase, seed=seed, act=act, dim=dim, impl=impl,
            device=device, dtype=dtype,
        )  # fmt: skip
        check_pairs(pairs, self.num_channels)
        if amplitude is not None:
            self._set_amplitude(amplitude, device)


class Rotate1d(RotateMd):
    """RoPE for text, a :class:`RotateMd` with a single axis and an ``offset`` instead of positions.

    ``module(q, k, offset=0)`` places token t at t + offset (see :func:`lrpe_md.lrpe_rotate_1d`). Pass ``cu_seqlens=``
    for packed sequences. To share positions between layers, pass ``positions=`` instead, such as a model's position_ids
    (B or 1, N, 1) or the result of :func:`lrpe_md.positions.packed_positions`.

    The arguments are the same as for :class:`RotateMd`, except for these:

    Args:
        scale_base, scale_centre: parameters of xPos, which scales q up and k down with position; see
            :func:`lrpe_md.xpos.scale_xpos`.
        theta: frequencies to use instead of ``base``, of shape (R/2,) or (1 or num_heads, R/2), or (num_heads,) for one
            per head. If ``learnable``, the frequencies are learned in this shape.
        amplitude: see :class:`RotateMd`. To change the amplitude later with :meth:`set_frequencies`, pass a value here,
            even if it is 1.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float | None = None,
        theta: Tensor | None = None,
        rotary_dim: int | slice | None = None,
        num_heads: int = 1,
        scale_base: float | None = None,
        scale_centre: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if scale_base is not None:
            check_scale(scale_base, scale_centre)
        elif scale_centre != 0:
            raise ValueError(f"scale_centre: expected None without scale_base, got {scale_centre!r}")
        self.scale_base, self.scale_centre = scale_base, scale_centre
        self.describes = scale_base is None
        if theta is not None:
            check_dense("theta", theta, "(R/2,), (num_heads, R/2) or (num_heads,) (pass rope_theta as base=)")
            theta = theta.detach()
            check_frequencies("theta", theta)
        self.given = None if theta is None else theta.to("cpu", torch.float64, copy=True)
        if self.given is not None:
            sequence_omega(self.given, rotary_slice(rotary_dim, head_dim)[1] // 2, num_heads)
            if kwargs.get("frequencies", "axial") != "axial":
                raise ValueError(f"frequencies: expected 'axial' when theta is passed, got {kwargs['frequencies']!r}")
        super().__init__(head_dim, 1, base=base, rotary_dim=rotary_dim, num_heads=num_heads, **kwargs)

    def _initial_frequencies(self, name: str) -> Tensor:
        if self.given is None:
            return super()._initial_frequencies(name)
        return self.given if name == "theta" else self._laid(self.given)

    def _laid(self, theta: Tensor) -> Tensor:
        return super()._laid(theta) if self.given is None else sequence_omega(theta, self.num_channels, self.num_heads)

    def _series_repr(self) -> str:
        return super()._series_repr() if self.given is None else f"theta={tuple(self.given.shape)}"

    @torch.no_grad()
    def set_frequencies(self, theta: Tensor, amplitude: float | Tensor = 1.0) -> None:
        """Replace the frequencies in place, for example to change the length scaling at run time.

        This also undoes :meth:`adjust`. Compiled code and captured CUDA graphs use the new values without recompiling.
        See :func:`lrpe_md.rope_frequencies`.

        Args:
            theta: new frequencies. The shape may differ from that of the original frequencies, but the number of heads
                must not.
            amplitude: new amplitude, which must be 1 unless the module was built with an amplitude.

        Raises:
            ValueError: for an invalid shape, or an amplitude for a module that was built without one.
        """
        omega = sequence_omega(theta, self.num_channels, self.num_heads)
        gain = self._buffers.get("amplitude")
        if gain is None and not (isinstance(amplitude, (int, float)) and amplitude == 1):
            raise ValueError(
                "amplitude: expected 1, because the module was built without an amplitude; to change the amplitude "
                "later, build the module with amplitude=1.0"
            )
        if gain is not None:
            check_broadcast("amplitude", amplitude, gain.shape)
        learned = next((name for name in self.shapes if name.endswith(("theta", "omega"))), None)
        if learned is None:
            if omega.shape[0] not in (1, self.omega.shape[0]):
                raise ValueError(
                    f"theta: expected 1 head or the module's number of heads, {self.omega.shape[0]}, got "
                    f"{tuple(theta.shape)}"
                )
        else:
            shape = tuple(self.shapes[learned])[:2]
            values = omega[..., 0] if learned == "omega" or shape == (1, self.num_channels) else theta
            if values.shape != shape:
                raise ValueError(
                    f"theta: expected the shape of the learned frequencies, {shape}, got {tuple(theta.shape)}"
                )
            self.load_state_dict({"omega": values.flatten()} if learned == "omega" else {"theta": values}, strict=False)
        vars(self).pop("_channels_of_axes", None)
        for name, value in (("omega", omega), ("amplitude", amplitude), ("ratio", 1.0)):
            for own in (self._buffers.get(name), self._buffers.get(f"trained_{name}")):
                if own is not None:
                    own.copy_(value) if isinstance(value, Tensor) else own.fill_(value)

    def _axes_advice(self, positions: Any, found: int) -> str:
        return f"; use RotateMd(head_dim, num_axes={found})"

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.scale_base is None else f", scale_base={self.scale_base:g}")

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        *xs: Tensor,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        positions: Positions | Packed | tuple[Positions, Positions] | None = None,
        qkv: Tensor | None = None,
        num_key_heads: int | None = None,
        inverse: bool = False,
        norm: Norm | None = None,
        out: Any = None,
        out_start: Tensor | None = None,
        attend: Callable[..., Any] | None = None,
    ) -> Any:
        """Rotate token t of x, or of q and k, by (t + offset) θ. The shape (B, H, N, D) and the dtype stay the same.

        Args:
            xs: x, or q and k, of shape (B, H, N, D). With cu_seqlens, (N, H, D) is also accepted.
            offset, cu_seqlens: see :func:`lrpe_md.lrpe_rotate_1d`.
            positions: explicit positions instead of offset and cu_seqlens: a :class:`Grid` or coordinates on one axis,
                a pair (for q, for k), or the result of :func:`lrpe_md.pack` for tokens (N, H, D).

        The other arguments are the same as for :meth:`RotateMd.forward`. xPos does not support ``out``, ``out_start``
        and ``inverse``. The result is differentiable with respect to xs and a learned theta.

        Raises:
            ValueError, TypeError: for an invalid argument, before a kernel is launched.
        """
        if attend is not None:
            return self._attend(attend, xs, positions, norm, out)
        if qkv is not None or num_key_heads is not None:
            again = partial(
                self.forward, offset=offset, cu_seqlens=cu_seqlens, positions=positions, inverse=inverse, norm=norm,
                out_start=out_start,
            )  # fmt: skip
            return encode_qkv(again, xs, qkv, num_key_heads, out)
        if len(xs) == 0:
            raise TypeError("x: expected one tensor or two (q, k), got none")
        if positions is None:
            x = xs[0]
            if not isinstance(x, Tensor) or (x.ndim != 4 and (cu_seqlens is None or x.ndim != 3)):
                check_input("x", x, x, packed=f"cu_seqlens, or {WHOLE_PACK}")
            positions = text_positions(x, offset, cu_seqlens, self.dim)
        elif cu_seqlens is not None or isinstance(offset, Tensor) or offset != 0:
            raise ValueError(
                "positions: expected None with offset or cu_seqlens, because positions already include both"
            )
        if self.scale_base is None:
            return super().forward(
                *xs, positions=positions, inverse=inverse, norm=norm, out=out, out_start=out_start
            )  # fmt: skip
        if out is not None or out_start is not None:
            raise ValueError("out: expected None with scale_base, because xPos scales q and k after their rotation")
        if len(xs) != 2:
            raise ValueError(
                f"xs: expected both q and k, got {plural(len(xs), 'tensor')}; xPos scales q and k differently"
            )
        if inverse:
            raise ValueError("inverse: expected False with scale_base, got True")
        if type(positions) is Packed:
            where = unpack_positions(positions, self.dim)
            return encode_packed(partial(self.forward, positions=where, norm=norm), xs, where.num_tokens)
        places: Any = self.locate(positions)
        q, k = super().forward(*xs, positions=places, norm=norm)
        return scale_xpos(
            q, k, positions=places, scale_base=self.scale_base, scale_centre=self.scale_centre, pairs=self.pairs,
            rotary_dim=self.rotary_dim,
        )  # fmt: skip


class PresetMd(FrequencyModule):
    """Encode q and k (B, H, N, D) with a published scheme.

    The result is (B, H, N, D) for rotation and (B, H, N, 2D) for the cosine map.

    Args:
        preset: name of a scheme or a :class:`lrpe_md.Scheme`, to build for ``head_dim`` and ``num_heads``, or a result
            of :func:`lrpe_md.preset`.
        head_dim, num_heads: sizes for a scheme or a name. The default sizes are the original model's; see
            :func:`lrpe_md.preset`.
        learnable: if True, learn theta (H or 1, C), with a separate frequency for each channel, or omega if each
            channel has its own direction. Heads only learn separate frequencies if the scheme defines them for each
            head, as with a ``series`` that returns (num_heads, num). The logarithm of theta is learned, except with
            "raw" or if the original model learns theta. The default depends on the scheme.
        act, phase: activation and phase to use instead of the scheme's; see :class:`CosineMd`.
        dim, impl: see :func:`lrpe_md.rotate`.
        dtype: dtype of frequencies and phase. The default is float64 for fixed frequencies and float32 for learned
            frequencies.

    The defaults of a :class:`lrpe_md.Scheme` are ``pairs="interleaved"`` and ``axis_order="major_first"``, whereas
    those of :class:`RotateMd` are "half" and "minor_first".

    Call with ``module(q, k, positions=module.positions((3, 5, 9)))``. Many schemes have their own rule for placing
    tokens. If you pass a plain :class:`Grid` with such a scheme, the module warns you and uses the grid unchanged.
    """

    axes: Tensor

    def __init__(
        self,
        preset: Preset | Scheme | str,
        *,
        head_dim: int | None = None,
        num_heads: int | None = None,
        learnable: Learnable | None = None,
        act: Act | None = None,
        dim: int | None = None,
        phase: Phase | None = None,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(preset, (str, Scheme)):
            preset = make_preset(preset, head_dim, num_heads)
        elif not isinstance(preset, Preset):
            raise TypeError(
                "preset: expected a name, a Scheme or the result of lrpe_md.preset(name, head_dim), got "
                f"{type(preset).__name__}"
            )
        elif head_dim is not None or num_heads is not None:
            raise ValueError(
                f"head_dim, num_heads: expected None with a Preset, which already defines both, got {head_dim}, "
                f"{num_heads}"
            )
        scheme = preset.scheme
        learnable = scheme.learned if learnable is None else learnable
        phase = (scheme.phase or False) if phase is None else phase
        if learnable and not phase and num_heads is not None and 1 == preset.omega.shape[0] < num_heads:
            remedy = "use a Scheme whose series (or omega) has one entry per head"
            warn_of_shared_heads(num_heads, repr(preset.name), remedy)
        own: Any = scheme.act if act is None else act
        self.preset, self.map, self.head_dim = preset, scheme.map, preset.head_dim
        if scheme.map == "rotate":
            self.pairs: Pairs = preset.pairs
        else:
            self.order = scheme.order
        self.rotary_dim = preset.rotary_dim
        self.phase_range = scheme.phase_range
        self.axial = isinstance(scheme.frequencies, Axial)
        if learnable and self.axial and scheme.learned:
            learnable = "raw"  # as in the original model
        super().__init__(
            preset.omega.shape[1], preset.num_axes, preset.num_heads, axial=self.axial, learnable=learnable,
            phase=phase, act=own, dim=dim, impl=impl, device=device,
            dtype=dtype or (torch.float32 if learnable else torch.float64), phase_dtype=dtype or torch.float32,
        )  # fmt: skip
        if isinstance(preset.amplitude, Tensor) or preset.amplitude != 1:
            self._set_amplitude(preset.amplitude, device)
        if learnable and self.axial:
            self.register_buffer("axes", self._initial("axes", device), persistent=False)

    def _initial_frequencies(self, name: str) -> Tensor:
        omega = self.preset.omega
        if name == "axes":
            return (omega != 0).to(omega.dtype)
        return omega.sum(-1) if name == "theta" else omega

    def _lay(self) -> Tensor:
        return multiply_in_own_dtype(self._theta()[..., None], self.axes)

    def _encode(self, xs: tuple[Tensor, ...], positions: Any, inverse: bool = False, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._check_rule(positions)
        return super()._encode(xs, positions, inverse, **options)

    def _axes_advice(self, positions: Any, found: int) -> str:
        if not isinstance(positions, Grid):
            return f"; pass coordinates on {plural(self.num_axes, 'axis')}, or module.positions(...)"
        has_rule = self._place(positions.shape) is not None
        return f"; pass {_name_positions(positions)}" if has_rule else f"; use a scheme with {plural(found, 'axis')}"

    def _place(self, shape: tuple[int, ...]) -> Grid | Coordinates | None:
        """Return the positions of a grid, or None if the scheme has no rule for this shape."""
        try:
            return self.preset.positions(shape)
        except (TypeError, ValueError):
            return None

    def _check_rule(self, positions: Any) -> None:
        """Warn once per shape if a plain grid differs from the positions that the scheme defines."""
        checked: set[Any] = self.__dict__.setdefault("_checked_shapes", set())
        if type(positions) is not Grid or positions.shape in checked or not is_plain_grid(positions):
            return
        if positions.num_axes != self.num_axes:  # an error, which says what to pass
            return
        checked.add(positions.shape)
        own = self._place(positions.shape)
        if own is not None and not (type(own) is Grid and own.shape == positions.shape and is_plain_grid(own)):
            warn_caller(
                f"positions: expected positions from {self.preset.name!r}, which has its own rule, got a plain Grid; "
                f"pass {_name_positions(positions)}"
            )

    def positions(self, *segments: Any, **options: Any) -> Grid | Coordinates:
        """Return the positions of a sequence, on the module's device.

        Call this once per forward pass, not in every layer. The arguments are the same as for
        :meth:`lrpe_md.presets.Preset.positions`.
        """
        options.setdefault("device", self._find_device())
        return self.preset.positions(*segments, **options)

    def extra_repr(self) -> str:
        text, frequencies = f"{self.preset.name!r}, head_dim={self.head_dim}", self.preset.scheme.frequencies
        text += f", num_axes={self.num_axes}"
        if isinstance(frequencies, Axial) and frequencies.has_axis_order:
            text += f", axis_order={frequencies.axis_order!r}"
        return text + super().extra_repr()


def _name_positions(grid: Grid) -> str:
    """Return the call to ``positions`` that an error or a warning about a grid recommends for a preset."""
    prefix = f"{grid.prefix}, " if grid.prefix else ""
    return f"module.positions({prefix}{grid.shape})"


def is_plain_grid(grid: Grid) -> bool:
    """Return whether a grid's positions equal the grid indices."""
    return grid.scale is grid.shift is grid.origin is None
