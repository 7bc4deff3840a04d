"""nn.Modules that own the frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .frequencies import AXIS_ORDERS, AxisOrder, axial_omega, geometric_theta, mixed_omega, sequence_omega
from .functional import Act, Impl, Pairs, Positions, encode, rotary_slice
from .sequences import text_positions

__all__ = ["CosineMd", "Rotate1d", "RotateMd"]

Frequencies = Literal["axial", "mixed"] | Callable[[int, int, int], Tensor]


class _Frequencies(nn.Module):
    """Owns theta (axial) or omega (mixed), and the phase: parameters where learnable, buffers elsewhere.

    They keep their dtype and value through ``.to(bfloat16)``, ``.half()`` and ``.double()``, and are rebuilt
    when a module made on the meta device materialises. Fixed frequencies are not in the state_dict: it stays
    that of the model without an encoding.

    FSDP2's mixed precision would cast learned frequencies: call ``fully_shard(model.rope)`` before
    ``fully_shard(model, mp_policy=...)``, and they are gathered, used and reduced in their own dtype.
    """

    theta: Tensor
    omega: Tensor
    phase: nn.Parameter | None

    def __init__(
        self,
        num_channels: int,
        num_axes: int,
        *,
        frequencies: Frequencies,
        base: float,
        num_heads: int,
        learnable: bool,
        axis_order: AxisOrder,
        phase: bool,
        seed: int,
        device: torch.device | str | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if not callable(frequencies) and frequencies not in ("axial", "mixed"):
            raise ValueError(
                "frequencies: expected 'axial', 'mixed' or a function (channels, heads, seed) -> omega, "
                f"got {frequencies!r}"
            )
        if axis_order not in AXIS_ORDERS:
            raise ValueError(f"axis_order: expected one of {AXIS_ORDERS}, got {axis_order!r}")
        if num_heads < 1:
            raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype: expected float32 or float64 (16 bits misplace far tokens), got {dtype}")
        self.num_channels, self.num_axes, self.num_heads = num_channels, num_axes, num_heads
        self.frequencies, self.base, self.seed = frequencies, base, seed
        self.axis_order: AxisOrder = axis_order
        self.learnable, self.dtype = learnable, dtype
        # An axial scheme learns theta, so that the zeros of omega stay zero.
        name = "theta" if learnable and frequencies == "axial" else "omega"
        initial = self._initial(name, device)
        if learnable:
            self.register_parameter(name, nn.Parameter(initial))
        else:
            self.register_buffer(name, initial, persistent=False)
        shape = (num_heads, num_channels)
        self.phase = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) if phase else None

    def _initial(self, name: str, device: torch.device | str | None = None) -> Tensor:
        if callable(self.frequencies):
            with torch.device("cpu"):
                omega = self.frequencies(self.num_channels, self.num_heads, self.seed)
            expected = (self.num_channels, self.num_axes)
            if omega.ndim != 3 or omega.shape[1:] != expected or omega.shape[0] not in (1, self.num_heads):
                raise ValueError(
                    f"frequencies: expected omega of shape (1 or {self.num_heads}, {expected[0]}, {expected[1]}), "
                    f"got {tuple(omega.shape)}"
                )
            return omega.to(device or torch.get_default_device(), self.dtype).contiguous()
        if self.frequencies == "mixed":
            generator = torch.Generator().manual_seed(self.seed)
            with torch.device("cpu"):
                omega = mixed_omega(
                    self.num_channels, self.num_axes, self.num_heads, base=self.base, generator=generator
                )
            return omega.to(device or torch.get_default_device(), self.dtype)
        with torch.device("cpu"):
            theta = geometric_theta(math.ceil(self.num_channels / self.num_axes), self.base)
            theta = theta.expand(self.num_heads, -1)
            if name == "omega":
                theta = axial_omega(theta, self.num_channels, self.num_axes, axis_order=self.axis_order)
        return theta.to(device or torch.get_default_device(), self.dtype).contiguous()

    def reset_parameters(self) -> None:
        """Set frequencies and phase to their initial values, in place."""
        for name, tensor in self._owned().items():
            self._reset(name, tensor)

    def _reset(self, name: str, tensor: Tensor) -> None:
        values = torch.zeros(tensor.shape) if name == "phase" else self._initial(name, "cpu")
        values = values.to(tensor.device, self.dtype)
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
            if parameter.dtype != self.dtype:  # assign=True takes what the state_dict has
                setattr(self, name, nn.Parameter(parameter.detach().to(self.dtype), parameter.requires_grad))
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
        if "theta" in self._parameters:
            return axial_omega(self.theta, self.num_channels, self.num_axes, axis_order=self.axis_order)
        return self.omega

    def extra_repr(self) -> str:
        text = f"num_axes={self.num_axes}, "
        if callable(self.frequencies):
            text += f"frequencies={getattr(self.frequencies, '__name__', type(self.frequencies).__name__)}"
        else:
            text += f"frequencies={self.frequencies!r}, base={self.base:g}"
        if self.frequencies == "axial" and self.num_axes > 1:
            text += f", axis_order={self.axis_order!r}"
        text += f", num_heads={self.num_heads}" if self.num_heads > 1 else ""
        text += ", learnable=True" if self.learnable else ""
        return text + (", phase=True" if self.phase is not None else "")


class CosineMd(_Frequencies):
    """:func:`lrpe_md.cosine` with frequencies of its own: q, k (B, H, N, D) → (B, H, N, 2D).

    Args:
        head_dim: D.
        num_axes: K, the length of the grid's shape.
        base: of the geometric series; 10000, or about 10 for "mixed" as in RoPE-ViT.
        frequencies: "axial" (a block of channels an axis), "mixed" (dense, random directions by head), or a function
            (channels, num_heads, seed) -> omega (1 or num_heads, channels, K), whose base and axis_order are its own.
        num_heads: 1 shares the frequencies between heads; otherwise the number of key heads.
        learnable: train theta (axial) or omega (others); otherwise they are a buffer, built once.
        axis_order: which axis the first block belongs to, see :func:`lrpe_md.axial_omega`.
        act, dim, impl: see :func:`lrpe_md.cosine`.
        phase: learn a phase (num_heads, D), starting at zero.
        seed: of the random directions.
        dtype: of the frequencies, float32 or float64, whatever the model is cast to.

    Call with ``module(x, positions=grid)`` or ``module(q, k, positions=grid)``.
    """

    def __init__(
        self,
        head_dim: int,
        num_axes: int = 2,
        *,
        base: float = 10000.0,
        frequencies: Frequencies = "axial",
        num_heads: int = 1,
        learnable: bool = False,
        axis_order: AxisOrder = "minor_first",
        act: Act = "none",
        dim: int | None = None,
        phase: bool = False,
        seed: int = 0,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            head_dim, num_axes, frequencies=frequencies, base=base, num_heads=num_heads, learnable=learnable,
            axis_order=axis_order, phase=phase, seed=seed, device=device, dtype=dtype,
        )  # fmt: skip
        self.head_dim, self.dim = head_dim, dim
        self.act: Act = act
        self.impl: Impl = impl

    def forward(self, *xs: Tensor, positions: Positions) -> Any:
        return encode(
            "cosine", xs, self.get_omega(), positions, self.act, self.dim, self.phase, "half", None, self.impl
        )

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, {super().extra_repr()}, act={self.act!r}"


class RotateMd(_Frequencies):
    """:func:`lrpe_md.rotate` with frequencies of its own: q, k (B, H, N, D) → (B, H, N, D).

    Args as for :class:`CosineMd`, and

    Args:
        pairs, rotary_dim: see :func:`lrpe_md.rotate`.
        phase: learn a phase (num_heads, R/2), starting at zero.
    """

    def __init__(
        self,
        head_dim: int,
        num_axes: int = 2,
        *,
        base: float = 10000.0,
        frequencies: Frequencies = "axial",
        num_heads: int = 1,
        learnable: bool = False,
        axis_order: AxisOrder = "minor_first",
        pairs: Pairs = "half",
        rotary_dim: int | slice | None = None,
        act: Act = "none",
        dim: int | None = None,
        phase: bool = False,
        seed: int = 0,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _, width = rotary_slice(rotary_dim, head_dim)
        super().__init__(
            width // 2, num_axes, frequencies=frequencies, base=base, num_heads=num_heads, learnable=learnable,
            axis_order=axis_order, phase=phase, seed=seed, device=device, dtype=dtype,
        )  # fmt: skip
        self.head_dim, self.rotary_dim, self.dim = head_dim, rotary_dim, dim
        self.pairs: Pairs = pairs
        self.act: Act = act
        self.impl: Impl = impl

    def forward(self, *xs: Tensor, positions: Positions) -> Any:
        return encode(
            "rotate", xs, self.get_omega(), positions, self.act, self.dim, self.phase, self.pairs, self.rotary_dim,
            self.impl,
        )  # fmt: skip

    def extra_repr(self) -> str:
        text = f"head_dim={self.head_dim}, {super().extra_repr()}, pairs={self.pairs!r}"
        text += f", rotary_dim={self.rotary_dim}" if self.rotary_dim is not None else ""
        return text + (f", act={self.act!r}" if self.act != "none" else "")


class Rotate1d(RotateMd):
    """RoPE for text: :class:`RotateMd` on one axis, called with an ``offset`` instead of positions.

    ``module(q, k, offset=0)``: token t sits at t + offset, an int or integers (), (1,) or (B,) that are read on the
    device (:func:`lrpe_md.lrpe_rotate_1d`). ``cu_seqlens=`` for sequences packed end to end, and ``positions=`` for
    those that were made once for all layers (:func:`lrpe_md.packed_positions`, a model's position_ids (B, N, 1)).

    Args as for :class:`RotateMd`, and

    Args:
        theta: the frequencies instead of ``base``: (R/2,), (num_heads, R/2) or (num_heads,), one a head; learned in
            that shape where ``learnable``.
        amplitude: factor of the rotated channels (YaRN, LongRoPE), a number or (R/2,). Where it is given, be it 1, it
            can be changed by :meth:`set_frequencies`; where it is None the kernels don't read one.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        theta: Tensor | None = None,
        amplitude: float | Tensor | None = None,
        rotary_dim: int | slice | None = None,
        num_heads: int = 1,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        num_pairs = rotary_slice(rotary_dim, head_dim)[1] // 2
        # What the buffers are made of again where a module made on the meta device materialises.
        self.given = None if theta is None else theta.detach().to("cpu", torch.float64, copy=True)
        self.gain = None
        if amplitude is not None:
            self.gain = torch.as_tensor(amplitude, dtype=torch.float64, device="cpu").detach().clone()
        if self.given is not None:
            sequence_omega(self.given, num_pairs, num_heads)
        if self.gain is not None and self.gain.shape not in ((), (num_pairs,)):
            raise ValueError(f"amplitude: expected a number or ({num_pairs},), got {tuple(self.gain.shape)}")
        super().__init__(
            head_dim, 1, base=base, rotary_dim=rotary_dim, num_heads=num_heads, device=device, **kwargs
        )  # fmt: skip
        if self.given is not None and self.frequencies == "mixed":
            raise ValueError("frequencies: expected 'axial' with a theta, got 'mixed'")
        if self.gain is not None:
            self.register_buffer("amplitude", self._initial("amplitude", device), persistent=False)

    def _initial(self, name: str, device: torch.device | str | None = None) -> Tensor:
        if name == "amplitude":
            assert self.gain is not None
            values = self.gain.expand(1, self.num_channels)
        elif self.given is None:
            return super()._initial(name, device)
        else:
            values = self.given
            if name == "omega":
                values = sequence_omega(values, self.num_channels, self.num_heads)
        with torch.device("cpu"):
            values = values.clone(memory_format=torch.contiguous_format)
        return values.to(device or torch.get_default_device(), self.dtype)

    def get_omega(self) -> Tensor:
        if self.given is not None and "theta" in self._parameters:
            return sequence_omega(self.theta, self.num_channels, self.num_heads)
        return super().get_omega()

    @torch.no_grad()
    def set_frequencies(self, theta: Tensor, amplitude: float | Tensor = 1.0) -> None:
        """Change the frequencies in place: another length scaling at run time, also under ``torch.compile`` and in a
        captured CUDA graph, without a recompile. See :func:`lrpe_md.rope_frequencies`.

        Args:
            theta: in a shape that the constructor takes; for learned frequencies in their own.
            amplitude: other than 1 only where the module was built with one.

        Raises:
            ValueError: a shape that does not fit, an amplitude that the module has no place for.
        """
        omega = sequence_omega(theta, self.num_channels, self.num_heads)
        gain = self._buffers.get("amplitude")
        if gain is None and not (isinstance(amplitude, (int, float)) and amplitude == 1):
            raise ValueError("amplitude: expected 1 in a module built without one, or build it with amplitude=1.0")
        learned = self._parameters.get("theta")
        if learned is not None:
            if theta.shape != learned.shape and omega.shape[0] == 1 and learned.shape == (1, self.num_channels):
                theta = theta[None]
            if theta.shape != learned.shape:
                raise ValueError(f"theta: expected {tuple(learned.shape)}, as learned, got {tuple(theta.shape)}")
            learned.copy_(theta)
        else:
            self.omega.copy_(omega)
        if isinstance(gain, Tensor):
            if isinstance(amplitude, Tensor):
                gain.copy_(amplitude)
            else:
                gain.fill_(amplitude)

    def extra_repr(self) -> str:
        text = super().extra_repr() + ("" if self.given is None else f", theta={tuple(self.given.shape)}")
        return text + ("" if self.gain is None else ", amplitude=True")

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        *xs: Tensor,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        positions: Positions | None = None,
    ) -> Any:
        if positions is None:
            positions = text_positions(xs[0], offset, cu_seqlens, self.dim)
        elif cu_seqlens is not None or isinstance(offset, Tensor) or offset != 0:
            raise ValueError("positions: expected them without offset and cu_seqlens, which they contain")
        return encode(
            "rotate", xs, self.get_omega(), positions, self.act, self.dim, self.phase, self.pairs, self.rotary_dim,
            self.impl, self._buffers.get("amplitude"),
        )  # fmt: skip
