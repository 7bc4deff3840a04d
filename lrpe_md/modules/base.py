"""Base of the modules: their frequencies and phase, and how both keep their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..checks import as_integer, can_read, is_real
from ..engine.core.operator import check_impl
from ..engine.encode.tables import NO_POSITIONS
from ..engine.encode.validate import Act, Impl, Order, Pairs, Positions, check_act, remedy
from ..engine.encode.views import Packed, encode_packed, encode_qkv, order_outs, unpack_positions
from ..engine.inductor.private import copy_each
from ..engine.linear.call import Description
from ..frequencies.axial import AXIS_ORDERS, AxisOrder, axial_omega
from ..frequencies.dense import mixed_omega
from ..frequencies.series import geometric_theta
from ..functional import cosine, rotate
from ..norm import Norm
from ..positions.grid import Grid

__all__ = ["Frequencies", "FrequencyModule", "Learnable", "Phase", "SeriesModule", "check_unwritten", "copy_together"]

Frequencies = Literal["axial", "mixed"] | Callable[[int, int, int], Tensor]
Learnable = bool | Literal["raw"]
Phase = bool | Literal["k"]


def copy_together(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Values into tensors, in one launch for those of a dtype and device."""
    if pairs:
        targets, values = zip(*pairs, strict=True)
        copy_each(list(targets), list(values), non_blocking=True)


def _log_magnitude(theta: Tensor) -> Tensor:
    """Return log |θ|, and 0 where θ is 0."""
    return torch.where(theta == 0, 1.0, theta.abs()).log()


def check_unwritten(out: Any) -> None:
    """Refuse ``out``, which linear attention doesn't have."""
    if out is not None:
        raise ValueError("out: expected None with attend, which receives q and k unencoded and writes neither")


class FrequencyModule(nn.Module):
    """Base class of the encodings: owns the frequencies, as a buffer or a parameter, and the phase, a parameter.

    What is learned is a parameter with one dimension, marked ``_no_weight_decay``, so that trainers that decay or
    orthogonalise (Muon) every matrix leave it alone; :func:`lrpe_md.parameter_groups` gives frequencies a learning
    rate of their own. :meth:`get_omega` and :meth:`get_phase` return both in their shapes.

    * ``log_theta``: the logarithm of θ, where each channel has one axis. A step of the optimiser then changes every
      frequency by the same share of it, the slow ones included, and none changes its sign.
    * ``theta``: θ itself, with ``learnable="raw"`` and in presets whose original learns it so.
    * ``omega``: ω itself, where channels have directions.

    All of these keep their dtype and value through ``.to(bfloat16)``, ``.half()`` and ``.double()``, and are rebuilt
    when a module made on the meta device materialises. Fixed frequencies are not in the state_dict: it stays
    that of the model without an encoding. A state_dict from before version 0.3, with θ or shaped tensors, loads.

    FSDP2's mixed precision would cast learned frequencies: call ``fully_shard(model.rope)`` before
    ``fully_shard(model, mp_policy=...)``, and they are gathered, used and reduced in their own dtype. FSDP1's casts
    buffers as well: ``MixedPrecision(buffer_dtype=torch.float32)``, and ``ignored_modules=[model.rope]`` where they are
    learned.
    """

    map: str
    head_dim: int
    log_theta: Tensor
    omega: Tensor
    ratio: Tensor
    amplitude: Tensor
    trained_omega: Tensor
    trained_amplitude: Tensor
    phase: nn.Parameter | None
    pairs: Pairs = "half"
    rotary_dim: int | slice | None = None
    order: Order = "cos_sin"
    phase_range: tuple[float, float] | None = None
    describes = True  # describe() says all of what it does to q and k
    takes_norm = True  # of q and k, in forward
    moved: tuple[int, ...] = ()  # axes of which set_places says where they are

    def __init__(
        self,
        num_channels: int,
        num_axes: int,
        num_heads: int,
        *,
        axial: bool,
        learnable: Learnable,
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
        """Frequencies and phase at their initial values; the arguments are those that the class says."""
        super().__init__()  # a module's own calls this last, since it asks for the initial values
        check_act(act, dim)
        check_impl(impl)
        for name, number in (("num_heads", num_heads), ("num_axes", num_axes)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}: expected at least 1, got {number}")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"dtype: expected float32 or float64 (16 bits are too coarse for distant tokens), got {dtype}"
            )
        if learnable not in (True, False, "raw"):
            raise ValueError(
                f"learnable: expected True, False or 'raw' (learn theta, not its logarithm), got {learnable!r}"
            )
        if phase not in (True, False, "k"):
            raise ValueError(f"phase: expected True, False or 'k' (only on the keys), got {phase!r}")
        if phase_groups < 1 or (phase_groups > 1 and not phase):
            raise ValueError(f"phase_groups: expected at least 1, and 1 without a phase, got {phase_groups}")
        self.num_channels, self.num_axes, self.num_heads = num_channels, num_axes, num_heads
        self.learnable, self.dtype, self.phase_dtype = learnable, dtype, phase_dtype or dtype
        self.phase_groups, self.keys_alone = phase_groups, phase == "k"
        self.act: Act = act
        self.dim = dim
        self.impl: Impl = impl
        self.shapes: dict[str, torch.Size] = {}  # of the parameters, which have one dimension
        if not learnable:
            self.register_buffer("omega", self._initial("omega", device), persistent=False)
        else:  # one axis a channel learns theta, so that the zeros of omega stay zero
            self._learn("omega" if not axial else "theta" if learnable == "raw" else "log_theta", device)
        self.register_parameter("phase", None)
        if phase:
            self._learn("phase", device)
        if "log_theta" in self._parameters:
            self._set_sign(self._initial_sign(device), persistent=False)
        self._mark()
        # What the buffer is made of again where a module made on the meta device materialises.
        self.gain = None
        if amplitude is not None:
            self.gain = torch.as_tensor(amplitude, dtype=torch.float64, device="cpu").detach().clone()
            if self.gain.shape not in ((), (num_channels,)):
                raise ValueError(f"amplitude: expected a number or ({num_channels},), got {tuple(self.gain.shape)}")
            self.register_buffer("amplitude", self._initial("amplitude", device), persistent=False)

    def _learn(self, name: str, device: torch.device | str | None) -> None:
        values = self._initial(name, device)
        self.shapes[name] = values.shape
        self.register_parameter(name, nn.Parameter(values.flatten()))

    def _mark(self) -> None:
        """Mark the parameters, new ones too, for trainers that ask for it."""
        for parameter in self.parameters(recurse=False):
            parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]

    def _initial_sign(self, device: torch.device | str | None) -> Tensor | None:
        """Return the signs of theta if not all are positive, else None."""
        with torch.device("cpu"):
            theta = self._initial_frequencies("theta")
        return self._initial("sign", device) if can_read(theta) and bool((theta <= 0).any()) else None

    def _set_sign(self, sign: Tensor | None, persistent: bool) -> None:
        """Keep signs in a buffer, in the state_dict only where they are not the initial ones."""
        self._buffers.pop("sign", None)
        self._non_persistent_buffers_set.discard("sign")
        if sign is not None:
            self.register_buffer("sign", sign, persistent=persistent)

    def _initial(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """A new tensor on ``device``, default torch's."""
        with torch.device("cpu"):
            if name == "phase":
                values = self._initial_phase()
            elif name == "log_theta":
                values = _log_magnitude(self._initial_frequencies("theta"))
            elif name == "sign":
                values = self._initial_frequencies("theta").sign()
            elif name in ("amplitude", "trained_amplitude"):
                gain = torch.ones((), dtype=torch.float64) if self.gain is None else self.gain
                values = gain.expand(1, self.num_channels)
            elif name.startswith("places_"):
                values = torch.arange(self.get_buffer(name).shape[0])
            elif name == "ratio":
                values = torch.ones_like(self._initial_frequencies("omega"))
            else:
                values = self._initial_frequencies("omega" if name == "trained_omega" else name)
        return values.to(device or torch.get_default_device(), self._dtype(name), copy=True).contiguous()

    def _initial_frequencies(self, name: str) -> Tensor:
        raise NotImplementedError  # each module's own

    def _initial_phase(self) -> Tensor:
        """Zero; groups apart, since equal ones would stay equal."""
        groups = math.pi / self.phase_groups * torch.arange(self.phase_groups, dtype=torch.float64)
        phase = groups[:, None, None].expand(-1, self.num_heads, self.num_channels)
        return phase if self.phase_groups > 1 else phase[0]

    def _dtype(self, name: str) -> torch.dtype:
        if name.startswith("places_"):
            return torch.float64
        return self.phase_dtype if name == "phase" else self.dtype

    def reset_parameters(self) -> None:
        """Set frequencies and phase to their initial values, in place."""
        for name, tensor in self._owned().items():
            self._reset(name, tensor)

    def _reset(self, name: str, tensor: Tensor) -> None:
        values = self._initial(name, "cpu").reshape(tensor.shape).to(tensor.device)
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
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()  # copies of parameters lose it

    @torch.no_grad()
    def upgrade_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Rewrite, in place, what another version or parametrisation saved of this module into what it loads.

        prefix: of its keys, as "encoding.".
        """
        theta, log, sign = (f"{prefix}{name}" for name in ("theta", "log_theta", "sign"))
        if "log_theta" in self._parameters and theta in state_dict and log not in state_dict:
            values = state_dict.pop(theta).to(self.dtype)
            state_dict[log] = _log_magnitude(values)
            found = (values.full_tensor() if hasattr(values, "placements") else values).sign().cpu().flatten()
            usual = self._initial_sign("cpu")
            usual = torch.ones_like(found) if usual is None else usual.to(found.dtype).flatten()
            if can_read(found) and found.shape == self.log_theta.shape and not torch.equal(found, usual):
                state_dict[sign] = found.reshape(self.shapes["log_theta"])
        elif "theta" in self._parameters and log in state_dict:
            values, signs = state_dict.pop(log).exp(), state_dict.pop(sign, None)
            signs = self._initial_sign(values.device) if signs is None else signs
            state_dict[theta] = values if signs is None else values * signs.reshape(values.shape)
        for name, shape in self.shapes.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == shape:
                state_dict[prefix + name] = value.flatten()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self.upgrade_state_dict(state_dict, prefix)
        if f"{prefix}log_theta" in state_dict and "log_theta" in self._parameters:
            sign, device = state_dict.get(f"{prefix}sign"), self.get_parameter("log_theta").device
            own = self._initial_sign(device) if sign is None else sign.to(device, self.dtype)
            self._set_sign(own, persistent=sign is not None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dtype != self._dtype(name):  # assign=True takes what the state_dict has
                setattr(self, name, nn.Parameter(parameter.detach().to(self._dtype(name)), parameter.requires_grad))
        # load_state_dict(assign=True) materialises a meta model without its non-persistent buffers.
        for name, buffer in list(self.named_buffers(recurse=False)):
            if buffer.is_meta and torch.get_default_device().type != "meta":
                setattr(self, name, self._initial(name))
        self._mark()

    def no_weight_decay(self) -> set[str]:
        """Frequencies and phases are not weights: a model that says so to its optimiser can ask here."""
        return {name for name, _ in self.named_parameters(recurse=False)}

    def get_omega(self) -> Tensor:
        """omega (H or 1, C, K), differentiable with respect to what is learned."""
        fixed = self._buffers.get("omega")  # past nn.Module.__getattr__, which takes a microsecond
        if fixed is not None:
            return fixed
        ratio = self._buffers.get("ratio")
        return self._learned() if ratio is None else self._learned() * ratio

    def get_phase(self) -> Tensor | None:
        """Return the phase (H, C), or (P, H, C) of groups, as it is learned; None: there is none."""
        return None if self.phase is None else self.phase.reshape(self.shapes["phase"])

    def _learned(self) -> Tensor:
        omega = self._parameters.get("omega")
        if omega is not None:
            return omega.reshape(self.shapes["omega"])
        return self.omega if "omega" in self._buffers else self._lay()

    def _theta(self) -> Tensor:
        """Return the learned theta in its shape."""
        log, sign = self._parameters.get("log_theta"), self._buffers.get("sign")
        if log is None:
            return self.get_parameter("theta").reshape(self.shapes["theta"])
        theta = log.exp().reshape(self.shapes["log_theta"])
        return theta if sign is None else theta * sign

    def _lay(self) -> Tensor:
        """omega from theta."""
        raise NotImplementedError  # of the modules that learn one

    def adjust(self, ratio: Tensor | None = None, amplitude: float | Tensor | None = None) -> None:
        """Other frequencies from now on: those trained times ``ratio``; and other amplitudes. In place, by a few small
        operators, with no wait for the device.

        Nothing is compiled or captured again for other values, but the first call of a module adds buffers that a
        compiled or captured program does not read yet: ``module.adjust()`` before that. They are not in the state_dict.

        Args:
            ratio: broadcast to ω (H or 1, C, K), on its device; None: as trained. What is learned goes on learning.
            amplitude: times that of the module, a number or (C,) or (1, C); None: 1. Not for tokens that are not
                rotated.

        Raises:
            ValueError: a shape that does not fit.
        """
        copy_together(self.adjusted(ratio, amplitude))

    @torch.no_grad()
    def adjusted(
        self, ratio: Tensor | None = None, amplitude: float | Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the buffers that :meth:`adjust` changes, with their new values."""
        trained = self.trained()
        for name, value, shape in (("ratio", ratio, trained.shape), ("amplitude", amplitude, (1, self.num_channels))):
            if isinstance(value, Tensor):
                try:
                    value.expand(shape)
                except RuntimeError:
                    raise ValueError(
                        f"{name}: expected a tensor that broadcasts to {tuple(shape)}, got {tuple(value.shape)}"
                    ) from None
        factor: Any = 1.0 if ratio is None else ratio
        gain: Any = 1.0 if amplitude is None else amplitude
        fixed = self._buffers.get("omega")
        frequencies = (self.ratio, torch.ones_like(self.ratio) * factor) if fixed is None else (fixed, trained * factor)
        return [frequencies, (self.amplitude, self.trained_amplitude * gain)]

    def trained(self) -> Tensor:
        """omega (H or 1, C, K) without what :meth:`adjust` does to it, which can be done from now on."""
        self._make_adjustable()
        return self.trained_omega if "trained_omega" in self._buffers else self._learned()

    def _make_adjustable(self) -> None:
        device = self._learned().device
        fixed = "omega" in self._buffers
        names = ("omega", "trained_omega") if fixed else ("ratio",)
        with torch.inference_mode(False), torch.no_grad():
            for name in (*names, "amplitude", "trained_amplitude"):
                own, now = self._buffers.get(name), self._buffers.get(name.removeprefix("trained_"))
                if own is not None and own.dtype == self.dtype:
                    continue
                whole = own is None and now is not None and now.dtype == self.dtype  # else cast by FSDP1 or DDP
                value = now.clone() if whole else self._initial(name, device)  # pyright: ignore[reportOptionalMemberAccess]
                self.register_buffer(name, value, persistent=False)

    def set_places(self, axis: int, places: Tensor | None) -> None:
        """Index i of an axis of grids is at ``places[i]`` from now on; None: where the grid has it, again.

        In place where there were as many before, so that nothing is compiled or captured again; with no wait for the
        device. Of grids that the module is called with: coordinates say themselves where tokens are. A grid becomes a
        table of coordinates at each call, see :meth:`lrpe_md.Grid.along`.

        Args:
            axis: 0 is the slowest, of videos time.
            places: numbers (n,), at least as many as a grid has on this axis.

        Raises:
            ValueError: an axis or a shape that does not fit.
        """
        if isinstance(axis, bool) or as_integer(axis) is None or not 0 <= axis < self.num_axes:
            raise ValueError(f"axis: expected a number from 0 to {self.num_axes - 1}, got {axis}")
        name = f"places_{axis}"
        if places is None:
            self._buffers.pop(name, None)
            self.moved = tuple(own for own in self.moved if own != axis)
            return
        if not isinstance(places, Tensor) or places.ndim != 1 or not is_real(places):
            found = f"{places.dtype} {tuple(places.shape)}" if isinstance(places, Tensor) else type(places).__name__
            raise ValueError(f"places: expected a tensor of numbers (n,), or None, got {found}")
        own = self._buffers.get(name)
        with torch.inference_mode(False), torch.no_grad():
            if own is None or own.shape != places.shape:
                own = torch.empty(places.shape, dtype=torch.float64, device=next(iter(self._owned().values())).device)
                self.register_buffer(name, own, persistent=False)
            own.copy_(places, non_blocking=True)
        self.moved = tuple(sorted({*self.moved, axis}))

    def locate(self, positions: Any) -> Any:
        """Positions, of grids with what :meth:`set_places` says."""
        if type(positions) is tuple:
            return tuple(self.locate(each) for each in positions)
        if not self.moved or not isinstance(positions, Grid):
            return positions
        return positions.along({axis: self.get_buffer(f"places_{axis}") for axis in self.moved})

    def forward(
        self,
        *xs: Tensor,
        positions: Positions | Packed | tuple[Positions, Positions] | None = None,
        qkv: Tensor | None = None,
        num_key_heads: int | None = None,
        inverse: bool = False,
        norm: Norm | None = None,
        out: Any = None,
        out_start: Tensor | None = None,
        attend: Callable[..., Any] | None = None,
    ) -> Any:
        """Encode x, or q and k, (B, H, N, D) each: (B, H, N, D) by rotation, (B, H, N, 2D) by the cosine map.

        Args:
            positions: a :class:`Grid`, :class:`Coordinates` or a tensor (N, K) or (B, N, K), or a pair for q and for k;
                or what :func:`lrpe_md.pack` gives, for packed tokens (N, H, D).
            qkv, num_key_heads: q, k and v in one tensor instead: see :func:`lrpe_md.rotate`.
            inverse: rotate by -Θ; for the cosine map there is none.
            norm: a :class:`lrpe_md.Norm` of q and k, taken with the map; its weights stay those of their own modules.
            out, out_start: where to write, a static key cache for one: see :func:`lrpe_md.rotate`.
            attend: return ``attend(self.describe(), *xs)`` instead, the description with ``norm``. So linear attention
                takes the frequencies within the module's hooks, in which FSDP gathers them.

        Differentiable with respect to xs and what is learned, as :func:`lrpe_md.rotate` and :func:`lrpe_md.cosine` are.

        Raises:
            ValueError, TypeError: what does not fit the module or is no input, before anything is launched.
        """
        if attend is not None:
            check_unwritten(out)
            return attend(self.describe()._replace(norm=norm), *xs)
        if positions is None:
            raise TypeError(NO_POSITIONS)
        if qkv is not None or num_key_heads is not None:
            again = partial(
                FrequencyModule.forward, self, positions=positions, inverse=inverse, norm=norm, out_start=out_start
            )
            return encode_qkv(again, xs, qkv, num_key_heads, out)
        if type(positions) is Packed:
            where = unpack_positions(positions, self.dim)
            again = partial(
                FrequencyModule.forward, self, positions=where, inverse=inverse, norm=norm, out_start=out_start,
                out=order_outs(out, xs),
            )  # fmt: skip
            return encode_packed(again, xs)
        if inverse and self.map == "cosine":
            raise ValueError("inverse: expected False for the cosine map, which has no inverse, got True")
        try:
            return self._encode(xs, positions, inverse, norm=norm, out=out, out_start=out_start)
        except (ValueError, TypeError):
            self._check_call(xs, positions)
            raise

    def _check_call(self, xs: tuple[Tensor, ...], positions: Any) -> None:
        """Say what does not fit in the words of the module, whose frequencies nobody passed."""
        own, wheres = next(iter(self._owned().values())), positions if type(positions) is tuple else (positions,)
        for name, x in zip(("q", "k") if len(xs) == 2 else ("x",), xs, strict=False):
            if not isinstance(x, Tensor) or x.is_nested or x.ndim != 4:
                return
            if x.shape[3] != self.head_dim:
                raise ValueError(
                    f"{name}: expected the module's head_dim, {self.head_dim}, got {x.shape[3]} ({tuple(x.shape)})"
                ) from None
            if x.shape[1] % self.num_heads:
                raise ValueError(
                    f"{name}: expected a multiple of the module's num_heads, {self.num_heads} (the heads of k), got "
                    f"{x.shape[1]} ({tuple(x.shape)}){remedy(x, wheres[0])}"
                ) from None
            if x.device != own.device:
                raise ValueError(
                    f"{name}: expected a tensor on the module's device {own.device}, got {x.device}; move one of them"
                ) from None
        for where in wheres:
            if isinstance(where, Tensor):
                found = where.shape[-1] if where.ndim > 1 else self.num_axes
            else:
                found = getattr(where, "num_axes", self.num_axes)
            if found != self.num_axes:
                raise ValueError(
                    f"positions: expected the module's num_axes, {self.num_axes}, got {found} axes"
                    + remedy(xs[0], where)
                ) from None

    def describe(self) -> Description:
        """Return the current arguments of :func:`lrpe_md.linear_attention` for this encoding."""
        map_: Any = self.map
        return Description(
            map_, self.get_omega(), self.act, self.dim, self._own_phase(), self.pairs, self.rotary_dim,
            self._buffers.get("amplitude"), self.order, self.impl,
        )  # fmt: skip

    def _own_phase(self) -> Any:
        """The phase, on the keys alone as a pair."""
        phase = self.get_phase()
        if phase is None:
            return None
        if self.phase_range is not None:
            # The gradient passes the bounds, which else would hold what they caught, or what begins there.
            phase = phase + (phase.clamp(*self.phase_range) - phase).detach()
        return (None, phase) if self.keys_alone else phase

    def _encode(self, xs: tuple[Tensor, ...], positions: Any, inverse: bool = False, **options: Any) -> Any:
        phase: Any = self._own_phase()
        if type(phase) is tuple and len(xs) != 2:
            raise ValueError(f"xs: expected q and k, because only the keys have a phase, got {len(xs)} tensors")
        omega, amplitude = self.get_omega(), self._buffers.get("amplitude")
        positions = self.locate(positions) if self.moved else positions
        if self.map == "cosine":
            return cosine(
                *xs, omega=omega, positions=positions, rotary_dim=self.rotary_dim, act=self.act, dim=self.dim,
                phase=phase, amplitude=amplitude, order=self.order, impl=self.impl, **options,
            )  # fmt: skip
        return rotate(
            *xs, omega=omega, positions=positions, pairs=self.pairs, rotary_dim=self.rotary_dim, act=self.act,
            dim=self.dim, phase=phase, amplitude=amplitude, inverse=inverse, impl=self.impl, **options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        text = f", num_heads={self.num_heads}" if self.num_heads > 1 else ""
        text += f", learnable={self.learnable!r}" if self.learnable else ""
        if self.phase is not None:
            text += f", phase={'k' if self.keys_alone else True!r}"
        return text + (f", phase_groups={self.phase_groups}" if self.phase_groups > 1 else "")


class SeriesModule(FrequencyModule):
    """Frequencies from a base, a block an axis or random directions, or from a function."""

    def __init__(
        self,
        num_channels: int,
        num_axes: int,
        num_heads: int,
        *,
        frequencies: Frequencies,
        base: float,
        axis_order: AxisOrder,
        seed: int,
        **kwargs: Any,
    ) -> None:
        if not callable(frequencies) and frequencies not in ("axial", "mixed"):
            raise ValueError(
                "frequencies: expected 'axial', 'mixed' or a function (channels, heads, seed) -> omega, "
                f"got {frequencies!r}"
            )
        if axis_order not in AXIS_ORDERS:
            raise ValueError(f"axis_order: expected one of {AXIS_ORDERS}, got {axis_order!r}")
        self.frequencies, self.base, self.seed = frequencies, base, seed
        self.axis_order: AxisOrder = axis_order
        super().__init__(num_channels, num_axes, num_heads, axial=frequencies == "axial", **kwargs)

    def _initial_frequencies(self, name: str) -> Tensor:
        if callable(self.frequencies):
            omega = self.frequencies(self.num_channels, self.num_heads, self.seed)
            expected = (self.num_channels, self.num_axes)
            if omega.ndim != 3 or omega.shape[1:] != expected or omega.shape[0] not in (1, self.num_heads):
                raise ValueError(
                    f"frequencies: expected omega of shape (1 or {self.num_heads}, {expected[0]}, {expected[1]}), "
                    f"got {tuple(omega.shape)}"
                )
            return omega
        if self.frequencies == "mixed":
            generator = torch.Generator().manual_seed(self.seed)
            return mixed_omega(self.num_channels, self.num_axes, self.num_heads, base=self.base, generator=generator)
        theta = geometric_theta(math.ceil(self.num_channels / self.num_axes), self.base).expand(self.num_heads, -1)
        return theta if name == "theta" else self._laid(theta)

    def _laid(self, theta: Tensor) -> Tensor:
        return axial_omega(theta, self.num_channels, self.num_axes, axis_order=self.axis_order)

    def _lay(self) -> Tensor:
        return self._laid(self._theta())

    def extra_repr(self) -> str:
        text = f"num_axes={self.num_axes}, "
        if callable(self.frequencies):
            text += f"frequencies={getattr(self.frequencies, '__name__', type(self.frequencies).__name__)}"
        else:
            text += f"frequencies={self.frequencies!r}, base={self.base:g}"
        if self.frequencies == "axial" and self.num_axes > 1:
            text += f", axis_order={self.axis_order!r}"
        return text + super().extra_repr()
