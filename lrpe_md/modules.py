"""nn.Modules that own the frequencies."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .coordinates import Coordinates
from .frequencies import AXIS_ORDERS, AxisOrder, axial_omega, geometric_theta, mixed_omega
from .functional import Act, Impl, Order, Pairs, Positions, check_act, check_impl, check_pairs, encode, rotary_slice
from .positions import Grid, offset_positions
from .schemes import Axial, Preset

__all__ = ["CosineMd", "PresetMd", "Rotate1d", "RotateMd"]

Phase = bool | Literal["k"]


class _Frequencies(nn.Module):
    """Owns theta (one axis a channel) or omega (dense), and the phase: parameters where learned, buffers elsewhere.

    They keep their dtype and value through ``.to(bfloat16)``, ``.half()`` and ``.double()``, and are rebuilt
    when a module made on the meta device materialises. Fixed frequencies are not in the state_dict: it stays
    that of the model without an encoding.
    """

    map: str
    theta: Tensor
    omega: Tensor
    phase: nn.Parameter | None
    pairs: Pairs = "half"
    rotary_dim: int | slice | None = None
    order: Order = "cos_sin"
    amplitude: float | Tensor | None
    phase_range: tuple[float, float] | None = None

    def __init__(
        self,
        num_channels: int,
        num_axes: int,
        num_heads: int,
        *,
        axial: bool,
        learnable: bool,
        phase: Phase,
        act: Act,
        dim: int | None,
        impl: Impl,
        device: torch.device | str | None,
        dtype: torch.dtype,
        phase_dtype: torch.dtype | None = None,
        phase_groups: int = 1,
        amplitude: float | Tensor | None = None,
    ) -> None:
        """Called last, since it asks for the initial values."""
        super().__init__()
        check_act(act, dim)
        check_impl(impl)
        if num_heads < 1:
            raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype: expected float32 or float64 (16 bits misplace far tokens), got {dtype}")
        if phase not in (True, False, "k"):
            raise ValueError(f"phase: expected True, False or 'k' (on the keys alone), got {phase!r}")
        if phase_groups < 1 or (phase_groups > 1 and not phase):
            raise ValueError(f"phase_groups: expected at least 1, and 1 without a phase, got {phase_groups}")
        self.num_channels, self.num_axes, self.num_heads = num_channels, num_axes, num_heads
        self.learnable, self.dtype, self.phase_dtype = learnable, dtype, phase_dtype or dtype
        self.phase_groups, self.keys_alone = phase_groups, phase == "k"
        self.act: Act = act
        self.dim = dim
        self.impl: Impl = impl
        # What has one axis a channel learns theta, so that the zeros of omega stay zero.
        name = "theta" if learnable and axial else "omega"
        initial = self._initial(name, device)
        if learnable:
            self.register_parameter(name, nn.Parameter(initial))
        else:
            self.register_buffer(name, initial, persistent=False)
        self.phase = nn.Parameter(self._initial("phase", device)) if phase else None
        if isinstance(amplitude, Tensor):
            self.register_buffer("amplitude", self._initial("amplitude", device), persistent=False)
        else:
            self.amplitude = amplitude

    def _initial(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """A new tensor on ``device``, default torch's."""
        with torch.device("cpu"):
            values = self._initial_phase() if name == "phase" else self._initial_frequencies(name)
        return values.to(device or torch.get_default_device(), self._dtype(name), copy=True).contiguous()

    def _initial_frequencies(self, name: str) -> Tensor:
        raise NotImplementedError

    def _initial_phase(self) -> Tensor:
        """Zero; groups apart, since equal ones would stay equal."""
        groups = math.pi / self.phase_groups * torch.arange(self.phase_groups, dtype=torch.float64)
        phase = groups[:, None, None].expand(-1, self.num_heads, self.num_channels)
        return phase if self.phase_groups > 1 else phase[0]

    def _dtype(self, name: str) -> torch.dtype:
        return self.phase_dtype if name == "phase" else self.dtype

    def reset_parameters(self) -> None:
        """Set frequencies and phase to their initial values, in place."""
        for name, tensor in self._owned().items():
            self._reset(name, tensor)

    def _reset(self, name: str, tensor: Tensor) -> None:
        values = self._initial(name, "cpu").to(tensor.device)
        if hasattr(tensor, "placements"):  # a DTensor: FSDP2's shards
            from torch.distributed.tensor import distribute_tensor

            tensor_: Any = tensor
            values = distribute_tensor(values, tensor_.device_mesh, tensor_.placements)
        with torch.no_grad():
            tensor.copy_(values)

    def _owned(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters(recurse=False)), **dict(self.named_buffers(recurse=False))}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def exact(t: Tensor) -> Tensor:
            out = fn(t)
            return out if out.dtype == t.dtype else t.to(out.device)

        was_meta = {name for name, t in self._owned().items() if t.is_meta}
        super()._apply(exact, recurse)
        for name, tensor in self._owned().items():
            if name in was_meta and not tensor.is_meta:
                self._reset(name, tensor)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dtype != self._dtype(name):  # assign=True takes what the state_dict has
                setattr(self, name, nn.Parameter(parameter.detach().to(self._dtype(name)), parameter.requires_grad))
        # load_state_dict(assign=True) materialises a meta model without its non-persistent buffers.
        for name, buffer in list(self.named_buffers(recurse=False)):
            if buffer.is_meta and torch.get_default_device().type != "meta":
                setattr(self, name, self._initial(name))

    def no_weight_decay(self) -> set[str]:
        """Frequencies and phases are not weights: a model that says so to its optimiser can ask here."""
        return {name for name, _ in self.named_parameters(recurse=False)}

    def get_omega(self) -> Tensor:
        """omega (H or 1, C, K), differentiable with respect to what is learned."""
        fixed = self._buffers.get("omega")  # past nn.Module.__getattr__, which takes a microsecond
        if fixed is not None:
            return fixed
        return self._lay() if "theta" in self._parameters else self.omega

    def _lay(self) -> Tensor:
        """omega from theta."""
        raise NotImplementedError

    def forward(self, *xs: Tensor, positions: Positions | tuple[Positions, Positions]) -> Any:
        phase: Any = self.phase
        if phase is not None:
            if self.phase_range is not None:
                # The gradient passes the bounds, which else would hold what they caught, or what begins there.
                phase = phase + (phase.clamp(*self.phase_range) - phase).detach()
            if self.keys_alone:
                if len(xs) != 2:
                    raise ValueError(
                        f"xs: expected q and k, since the phase is on the keys alone, got {len(xs)} tensors"
                    )
                phase = (None, phase)
        return encode(
            self.map, xs, self.get_omega(), positions, self.act, self.dim, phase, self.pairs, self.rotary_dim,
            self.impl, self.amplitude, self.order,
        )  # fmt: skip

    def extra_repr(self) -> str:
        text = f", num_heads={self.num_heads}" if self.num_heads > 1 else ""
        text += ", learnable=True" if self.learnable else ""
        if self.phase is not None:
            text += f", phase={'k' if self.keys_alone else True!r}"
        return text + (f", phase_groups={self.phase_groups}" if self.phase_groups > 1 else "")


class _Series(_Frequencies):
    """Frequencies from a base: a block an axis, or random directions."""

    def __init__(
        self,
        num_channels: int,
        num_axes: int,
        num_heads: int,
        *,
        frequencies: Literal["axial", "mixed"],
        base: float,
        axis_order: AxisOrder,
        seed: int,
        **kwargs: Any,
    ) -> None:
        if frequencies not in ("axial", "mixed"):
            raise ValueError(f"frequencies: expected 'axial' or 'mixed', got {frequencies!r}")
        if axis_order not in AXIS_ORDERS:
            raise ValueError(f"axis_order: expected one of {AXIS_ORDERS}, got {axis_order!r}")
        self.frequencies, self.base, self.seed = frequencies, base, seed
        self.axis_order: AxisOrder = axis_order
        super().__init__(num_channels, num_axes, num_heads, axial=frequencies == "axial", **kwargs)

    def _initial_frequencies(self, name: str) -> Tensor:
        if self.frequencies == "mixed":
            generator = torch.Generator().manual_seed(self.seed)
            return mixed_omega(self.num_channels, self.num_axes, self.num_heads, base=self.base, generator=generator)
        theta = geometric_theta(math.ceil(self.num_channels / self.num_axes), self.base).expand(self.num_heads, -1)
        return theta if name == "theta" else self._laid(theta)

    def _laid(self, theta: Tensor) -> Tensor:
        return axial_omega(theta, self.num_channels, self.num_axes, axis_order=self.axis_order)

    def _lay(self) -> Tensor:
        return self._laid(self.theta)

    def extra_repr(self) -> str:
        text = f"num_axes={self.num_axes}, frequencies={self.frequencies!r}, base={self.base:g}"
        if self.frequencies == "axial" and self.num_axes > 1:
            text += f", axis_order={self.axis_order!r}"
        return text + super().extra_repr()


class CosineMd(_Series):
    """:func:`lrpe_md.cosine` with frequencies of its own: q, k (B, H, N, D) → (B, H, N, 2D).

    Args:
        head_dim: D.
        num_axes: K, the length of the grid's shape.
        base: of the geometric series; 10000, or about 10 for "mixed" as in RoPE-ViT.
        frequencies: "axial" (a block of channels an axis) or "mixed" (dense, random directions by head).
        num_heads: 1 shares the frequencies between heads; otherwise the number of key heads.
        learnable: train theta (axial) or omega (mixed); otherwise they are a buffer, built once.
        axis_order: which axis the first block belongs to, see :func:`lrpe_md.axial_omega`.
        act, dim, impl: see :func:`lrpe_md.cosine`.
        phase: learn a phase (num_heads, D), starting at zero, on q and k, or with "k" on the keys alone (PoPE).
        phase_groups: P > 1: learn P of them, (P, num_heads, D), group g starting at π g / P; see
            :func:`lrpe_md.cosine` for what they give and cost.
        seed: of the random directions.
        dtype: of the frequencies, float32 or float64, whatever the model is cast to.

    Call with ``module(x, positions=grid)`` or ``module(q, k, positions=grid)``.
    """

    map = "cosine"

    def __init__(
        self,
        head_dim: int,
        num_axes: int = 2,
        *,
        base: float = 10000.0,
        frequencies: Literal["axial", "mixed"] = "axial",
        num_heads: int = 1,
        learnable: bool = False,
        axis_order: AxisOrder = "minor_first",
        act: Act = "none",
        dim: int | None = None,
        phase: Phase = False,
        phase_groups: int = 1,
        seed: int = 0,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.head_dim = head_dim
        super().__init__(
            head_dim, num_axes, num_heads, frequencies=frequencies, base=base, learnable=learnable,
            axis_order=axis_order, phase=phase, phase_groups=phase_groups, seed=seed, act=act, dim=dim, impl=impl,
            device=device, dtype=dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, {super().extra_repr()}, act={self.act!r}"


class RotateMd(_Series):
    """:func:`lrpe_md.rotate` with frequencies of its own: q, k (B, H, N, D) → (B, H, N, D).

    Args as for :class:`CosineMd`, and

    Args:
        pairs, rotary_dim: see :func:`lrpe_md.rotate`.
        phase: learn a phase (num_heads, R/2), starting at zero, on q and k, or with "k" on the keys alone.
    """

    map = "rotate"

    def __init__(
        self,
        head_dim: int,
        num_axes: int = 2,
        *,
        base: float = 10000.0,
        frequencies: Literal["axial", "mixed"] = "axial",
        num_heads: int = 1,
        learnable: bool = False,
        axis_order: AxisOrder = "minor_first",
        pairs: Pairs = "half",
        rotary_dim: int | slice | None = None,
        act: Act = "none",
        dim: int | None = None,
        phase: Phase = False,
        seed: int = 0,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _, width = rotary_slice(rotary_dim, head_dim)
        check_pairs(pairs, width // 2)
        self.head_dim, self.rotary_dim = head_dim, rotary_dim
        self.pairs: Pairs = pairs
        super().__init__(
            width // 2, num_axes, num_heads, frequencies=frequencies, base=base, learnable=learnable,
            axis_order=axis_order, phase=phase, seed=seed, act=act, dim=dim, impl=impl, device=device, dtype=dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        text = f"head_dim={self.head_dim}, {super().extra_repr()}, pairs={self.pairs!r}"
        text += f", rotary_dim={self.rotary_dim}" if self.rotary_dim is not None else ""
        return text + (f", act={self.act!r}" if self.act != "none" else "")


class Rotate1d(RotateMd):
    """RoPE for text: :class:`RotateMd` on one axis, called with an ``offset`` instead of positions.

    ``module(q, k, offset=0)``: token t sits at t + offset, an int or a tensor (B,) of one offset a sample.
    """

    def __init__(self, head_dim: int, *, base: float = 10000.0, **kwargs: Any) -> None:
        super().__init__(head_dim, 1, base=base, **kwargs)

    def forward(self, *xs: Tensor, offset: int | Tensor = 0) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(*xs, positions=offset_positions(xs[0].shape[-2], offset, xs[0].device))


class PresetMd(_Frequencies):
    """A published scheme as a module: q, k (B, H, N, D) → (B, H, N, D), or (B, H, N, 2D) for the cosine map.

    Args:
        preset: what :func:`lrpe_md.preset` gives: its frequencies, amplitude, pairs, activation and order, and a phase
            where the scheme has one.
        learnable: train theta (num_heads or 1, C), a frequency a channel, or omega where a channel has a direction;
            default: where the scheme does.
        act: instead of the scheme's.
        dim, impl: see :func:`lrpe_md.rotate`.
        dtype: of frequencies and phase; default: float64 for what is fixed, float32 for what is learned.

    Call with ``module(q, k, positions=module.positions((3, 5, 9)))``.
    """

    axes: Tensor

    def __init__(
        self,
        preset: Preset,
        *,
        learnable: bool | None = None,
        act: Act | None = None,
        dim: int | None = None,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(preset, Preset):
            raise TypeError(f"preset: expected what lrpe_md.preset(name, head_dim) gives, got {type(preset).__name__}")
        scheme = preset.scheme
        learnable = scheme.learned if learnable is None else learnable
        own: Any = scheme.act if act is None else act
        self.preset, self.map, self.head_dim = preset, scheme.map, preset.head_dim
        self.pairs: Pairs = scheme.pairs
        self.order: Order = scheme.order
        self.phase_range = scheme.phase_range
        self.axial = isinstance(scheme.frequencies, Axial)
        super().__init__(
            preset.omega.shape[1], preset.num_axes, preset.num_heads, axial=self.axial, learnable=learnable,
            phase=scheme.phase or False, act=own, dim=dim, impl=impl, device=device,
            dtype=dtype or (torch.float32 if learnable else torch.float64), phase_dtype=dtype or torch.float32,
            amplitude=preset.amplitude,
        )  # fmt: skip
        if learnable and self.axial:
            self.register_buffer("axes", self._initial("axes", device), persistent=False)

    def _initial_frequencies(self, name: str) -> Tensor:
        omega = self.preset.omega
        if name == "amplitude":
            return torch.as_tensor(self.preset.amplitude)
        if name == "axes":
            return (omega != 0).to(omega.dtype)
        return omega.sum(-1) if name == "theta" else omega

    def _lay(self) -> Tensor:
        return self.theta[..., None] * self.axes

    def positions(self, *segments: Any, **options: Any) -> Grid | Coordinates:
        """:meth:`Preset.positions`, a table on the module's device: once a forward, not once a layer."""
        options.setdefault("device", next(iter(self._owned().values())).device)
        return self.preset.positions(*segments, **options)

    def extra_repr(self) -> str:
        text = f"{self.preset.name!r}, head_dim={self.head_dim}, num_axes={self.num_axes}{super().extra_repr()}"
        return text + (f", act={self.act!r}" if self.act != "none" else "")
