"""Base class of the encoding modules. The class stores frequencies and phases, and preserves their precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import dropwhile
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from ..checks import (
    as_integer,
    can_read,
    check_at_least,
    check_frequencies,
    check_one_of,
    check_precise,
    explain_unknown_keyword,
    is_real,
    plural,
    rotary_slice,
    show_value,
    suggest,
    warn_caller,
)
from ..engine.core.call import Act, Impl, Order, Pairs, Positions
from ..engine.core.operator import check_impl
from ..engine.encode.tables import explain_missing, find_positional
from ..engine.encode.validate import WHOLE_PACK, check_act, remedy_layout
from ..engine.encode.views import Packed, encode_packed, encode_qkv, order_outs, unpack_positions
from ..engine.inductor.private import copy_each
from ..engine.linear.call import Description
from ..frequencies.axial import AXIS_ORDERS, AxisOrder, axial_omega, cut_blocks, warn_of_idle_axes
from ..frequencies.dense import mixed_omega
from ..frequencies.series import call_function, geometric_theta
from ..functional import cosine, rotate
from ..norm import Norm
from ..positions.grid import Grid

__all__ = [
    "DEFAULT_BASES", "Frequencies", "FrequencyModule", "Learnable", "Phase", "SeriesModule", "copy_together",
    "warn_of_shared_heads",
]  # fmt: skip

Frequencies = Literal["axial", "mixed"] | Callable[[int, int, int], Tensor]
Learnable = bool | Literal["raw"]
Phase = bool | Literal["k"]
BUILT_FROM = {"axis_order", "base", "frequencies", "learnable", "preset", "seed"}  # read only when a module is built
DEFAULT_BASES = {"axial": 1e4, "mixed": 10.0}  # from RoFormer (arXiv 2104.09864) and RoPE-ViT (arXiv 2403.13298)


def warn_of_shared_heads(num_heads: int, owner: str, remedy: str) -> None:
    """Warn that ``num_heads`` does not give each head its own learned frequencies."""
    warn_caller(
        f"num_heads: expected 1, got {num_heads}. All heads share the learned frequencies of {owner}; to learn "
        f"separate frequencies for each head, {remedy}"
    )


def copy_together(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the value of each pair (tensor, value) into the tensor, with one launch per dtype and device."""
    if pairs:
        targets, values = zip(*pairs, strict=True)
        copy_each(list(targets), list(values), non_blocking=True)


def multiply_in_own_dtype(learned: Tensor, buffer: Tensor) -> Tensor:
    """Multiply without promotion, so that the kernel's check finds parameters that a library cast to 16 bits."""
    return learned * buffer.to(learned.dtype)


def without_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without leading axes of size 1."""
    return tuple(dropwhile(lambda n: n == 1, shape))


def check_broadcast(name: str, value: Any, shape: Sequence[int]) -> None:
    """Check that a tensor broadcasts to a shape. Accept values other than tensors."""
    try:
        value = value.expand(shape) if isinstance(value, Tensor) else value
    except RuntimeError:
        found = tuple(value.shape)
        raise ValueError(f"{name}: expected a tensor that broadcasts to {tuple(shape)}, got {found}") from None


def _log_magnitude(theta: Tensor) -> Tensor:
    """Return log |θ|, or 0 where θ is 0."""
    return torch.where(theta == 0, 1.0, theta.abs()).log()


def _explain_unknown_option(owner: str, name: str) -> str:
    """Return an error message for a keyword argument that the encoding modules don't accept."""
    remedies = {
        "cu_seqlens": f"for packed tokens, pass {WHOLE_PACK}",
        "offset": "to start a grid elsewhere, pass positions=Grid(shape, origin=torch.tensor([...])), with one integer "
        "per axis",
    }
    known = ("positions", "qkv", "num_key_heads", "inverse", "norm", "out", "out_start")
    advice = f"; {remedies[name]}" if name in remedies else suggest(name, known)
    return explain_unknown_keyword(owner, name, "call", advice)


class PreciseModule(nn.Module):
    """Module whose parameters and buffers keep their dtype through casts, without weight decay.

    When a module made on the meta device is materialised, or any module is emptied with ``to_empty``, its parameters
    and buffers get their initial values. The same applies to tensors that ``from_pretrained`` of transformers doesn't
    find in a checkpoint.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        tensors = {**vars(self).get("_parameters", {}), **vars(self).get("_buffers", {})}
        old = tensors.get(name)
        super().__setattr__(name, value)
        # transformers replaces meta tensors by loaded or uninitialised ones, and sets _is_hf_initialized on the loaded
        # tensors. It also sets this flag on each module, after calling _init_weights, which doesn't know our modules.
        if old is not None and old.is_meta:
            vars(self).setdefault("_meta_names", set()).add(name)
        elif name == "_is_hf_initialized":
            for each in vars(self).pop("_meta_names", ()):
                tensor = tensors.get(each)
                if tensor is not None and not tensor.is_meta and not hasattr(tensor, name):
                    self._reset(each, tensor)
            self._mark()

    def _initial(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """Return the initial value of a parameter or buffer, as a new tensor on ``device`` or the default device."""
        raise NotImplementedError  # implemented by each subclass

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, which are all learned parameters."""
        return {name for name, _ in self.named_parameters(recurse=False)}

    def _mark(self) -> None:
        """Mark all parameters as exempt from weight decay."""
        for parameter in self.parameters(recurse=False):
            parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]

    def reset_parameters(self) -> None:
        """Reset parameters and buffers to their initial values, in place."""
        for name, tensor in self._owned().items():
            self._reset(name, tensor)

    def _reset(self, name: str, tensor: Tensor) -> None:
        values = self._initial(name, "cpu").reshape(tensor.shape).to(tensor.device)
        if hasattr(tensor, "placements"):  # a DTensor, sharded by FSDP2
            from torch.distributed.tensor import distribute_tensor

            tensor_: Any = tensor
            values = distribute_tensor(values, tensor_.device_mesh, tensor_.placements)
        with torch.no_grad():
            tensor.copy_(values)

    def _owned(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters(recurse=False)), **dict(self.named_buffers(recurse=False))}

    def _dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter or buffer."""
        return torch.float32

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dtype != self._dtype(name):  # assign=True adopts the state_dict's dtype
                setattr(self, name, nn.Parameter(parameter.detach().to(self._dtype(name)), parameter.requires_grad))
        # load_state_dict(assign=True) leaves non-persistent buffers of a meta model on meta.
        for name, buffer in list(self.named_buffers(recurse=False)):
            if buffer.is_meta and torch.get_default_device().type != "meta":
                setattr(self, name, self._initial(name))
        vars(self).pop("_meta_names", None)
        self._mark()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def exact(t: Tensor) -> Tensor:
            out = fn(t)
            return out if out.dtype == t.dtype else t.to(out.device)

        # model.to_empty() reaches each module as a function that returns uninitialised tensors.
        is_emptied = getattr(fn, "__code__", None) in nn.Module.to_empty.__code__.co_consts
        was_empty = {name for name, t in self._owned().items() if is_emptied or t.is_meta}
        super()._apply(exact, recurse)
        for name, tensor in self._owned().items():
            if name in was_empty and not tensor.is_meta:
                self._reset(name, tensor)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()  # copying parameters drops the mark


class FrequencyModule(PreciseModule):
    """Base class of the encoding modules. Frequencies are a buffer or a parameter, and a learned phase is a parameter.

    Learned parameters are one-dimensional and marked ``_no_weight_decay``. Optimisers that decay or orthogonalise
    (Muon) every matrix therefore skip these parameters. :func:`lrpe_md.parameter_groups` can set a separate learning
    rate for frequencies. :meth:`get_omega` and :meth:`get_phase` return frequencies and phase in their full shapes. One
    of these parameters is learned:

    * ``log_theta``: the logarithm of θ, if each channel has one axis. An optimiser step then changes slow and fast
      frequencies by the same relative amount, and never flips a sign.
    * ``theta``: θ itself, with ``learnable="raw"`` and for presets whose original model learns θ.
    * ``omega``: ω itself, if each channel has its own direction.

    Frequencies and phases keep their dtype and value through ``.to(bfloat16)``, ``.half()`` and ``.double()``, and are
    rebuilt when a module made on the meta device is materialised. Fixed frequencies are not saved, so the state_dict
    matches that of a model without an encoding. A state_dict saved before version 0.3, with θ or unflattened tensors,
    can still be loaded.

    FSDP2's mixed precision would cast learned frequencies. Call ``fully_shard`` on this module (``model.encoding`` in
    adapted models and backbones) before ``fully_shard(model, mp_policy=...)`` to gather, use and reduce these
    frequencies in their own dtype. FSDP1 also casts buffers. To prevent that, use
    ``MixedPrecision(buffer_dtype=torch.float32)``, and pass this module in ``ignored_modules`` if its frequencies are
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
    describes = True  # whether describe() fully describes the encoding
    takes_norm = True  # whether forward accepts a norm
    moved: tuple[int, ...] = ()  # axes whose positions come from set_places

    def __setattr__(self, name: str, value: Any) -> None:
        if name in BUILT_FROM and name in self.__dict__:
            raise AttributeError(
                f"{name}: can't be changed after the module is built, got {show_value(value)}; build a new module, or "
                "scale the frequencies with module.adjust(ratio)"
            )
        super().__setattr__(name, value)
        if name in ("omega", "amplitude") and f"trained_{name}" in self._buffers:
            self._buffers[f"trained_{name}"] = value.detach().clone()  # adjust() must start from the new value
            vars(self).pop("_channels_of_axes", None)

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
    ) -> None:
        """Initialise the frequencies and the phase. The arguments are documented in the subclasses."""
        super().__init__()  # subclasses call __init__ last, because it needs their initial values
        check_act(act, dim)
        check_impl(impl)
        check_at_least(1, num_heads=num_heads, num_axes=num_axes)
        check_precise("dtype", dtype)
        if learnable not in (True, False, "raw"):
            raise ValueError(
                f"learnable: expected True, False or 'raw' (learn theta, not its logarithm), got {learnable!r}"
            )
        if phase not in (True, False, "k"):
            raise ValueError(f"phase: expected True, False or 'k' (only on the keys), got {phase!r}")
        check_at_least(1, phase_groups=phase_groups)
        if phase_groups > 1 and not phase:
            raise ValueError(f"phase_groups: expected 1 without a phase, got {phase_groups}")
        self.num_channels, self.num_axes, self.num_heads = num_channels, num_axes, num_heads
        self.learnable, self.dtype, self.phase_dtype = learnable, dtype, phase_dtype or dtype
        self.phase_groups, self.keys_alone = phase_groups, phase == "k"
        self.act: Act = act
        self.impl: Impl = impl
        self.dim, self.gain = dim, None  # gain rebuilds the buffer when a meta module is materialised
        self.shapes: dict[str, torch.Size] = {}  # full shapes of the flattened parameters
        if not learnable:
            self.register_buffer("omega", self._initial("omega", device), persistent=False)
        else:  # with one axis per channel, learn theta so that the zeros of omega stay zero
            self._learn("omega" if not axial else "theta" if learnable == "raw" else "log_theta", device)
        self.register_parameter("phase", None)
        if phase:
            self._learn("phase", device)
        if "log_theta" in self._parameters:
            self._set_sign(self._initial_sign(device), persistent=False)
        self._mark()

    def _set_amplitude(self, amplitude: float | Tensor, device: torch.device | str | None) -> None:
        self.gain = torch.as_tensor(amplitude, dtype=torch.float64, device="cpu").detach().clone()
        if self.gain.shape not in ((), (self.num_channels,)):
            raise ValueError(
                f"amplitude: expected a number or a tensor of shape ({self.num_channels},), got "
                f"{tuple(self.gain.shape)}"
            )
        if can_read(self.gain) and not self.gain.isfinite().all():
            raise ValueError("amplitude: expected finite numbers, got NaN or infinity")
        self.register_buffer("amplitude", self._initial("amplitude", device), persistent=False)

    def _learn(self, name: str, device: torch.device | str | None) -> None:
        values = self._initial(name, device)
        self.shapes[name] = values.shape
        self.register_parameter(name, nn.Parameter(values.flatten()))

    def _initial_sign(self, device: torch.device | str | None) -> Tensor | None:
        """Return the signs of the initial theta, or None if all are positive."""
        with torch.device("cpu"):
            theta = self._initial_frequencies("theta")
        return self._initial("sign", device) if can_read(theta) and bool((theta <= 0).any()) else None

    def _set_sign(self, sign: Tensor | None, persistent: bool) -> None:
        """Store the signs of theta in a buffer. The state_dict includes the buffer if ``persistent`` is True."""
        self._buffers.pop("sign", None)
        self._non_persistent_buffers_set.discard("sign")
        if sign is not None:
            self.register_buffer("sign", sign, persistent=persistent)

    def _initial(self, name: str, device: torch.device | str | None = None) -> Tensor:
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
        device = torch.get_default_device() if device is None else device
        return values.to(device, self._dtype(name), copy=True).contiguous()

    def _initial_frequencies(self, name: str) -> Tensor:
        raise NotImplementedError  # implemented by each subclass

    def _initial_phase(self) -> Tensor:
        """Return zeros, or different phases per group, because groups with equal phases would train identically."""
        groups = math.pi / self.phase_groups * torch.arange(self.phase_groups, dtype=torch.float64)
        phase = groups[:, None, None].expand(-1, self.num_heads, self.num_channels)
        return phase if self.phase_groups > 1 else phase[0]

    def _dtype(self, name: str) -> torch.dtype:
        if name.startswith("places_"):
            return torch.float64
        return self.phase_dtype if name == "phase" else self.dtype

    @torch.no_grad()
    def upgrade_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Convert, in place, state_dict entries saved by a different version or parametrisation of this module.

        prefix: prefix of the module's keys in the state_dict, such as "encoding.".
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

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        own = {"map": self.map, "shapes": {name: tuple(shape) for name, shape in self.shapes.items()}}
        getattr(destination, "_metadata", {}).setdefault(prefix[:-1], {}).update(own)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *args: Any, **kwargs: Any) -> None:
        saved = metadata.get("map", self.map)  # safetensors and earlier versions save no metadata
        if saved != self.map and any(prefix + name in state_dict for name in ("phase", "omega", "theta", "log_theta")):
            args[-1].append(
                f"{prefix}map: expected the frequencies or phase of a module with map {self.map!r}, got those of one "
                f"with map {saved!r}; build the same kind of module as the one that was saved"
            )
            return
        for name, shape in metadata.get("shapes", {}).items():
            own = self.shapes.get(name, torch.Size(shape))
            is_other = without_leading_ones(own) != without_leading_ones(shape)
            if is_other and own.numel() == math.prod(shape) and prefix + name in state_dict:
                args[-1].append(
                    f"{prefix}{name}: expected values of shape {tuple(own)} before flattening, got {tuple(shape)}; "
                    "build the module with the head_dim, num_axes, num_heads and phase_groups of the one that was saved"
                )
                return
        self.upgrade_state_dict(state_dict, prefix)
        if f"{prefix}log_theta" in state_dict and "log_theta" in self._parameters:
            sign, device = state_dict.get(f"{prefix}sign"), self.get_parameter("log_theta").device
            own = self._initial_sign(device) if sign is None else sign.to(device, self.dtype)
            self._set_sign(own, persistent=sign is not None)
        super()._load_from_state_dict(state_dict, prefix, metadata, *args, **kwargs)

    def get_omega(self) -> Tensor:
        """Return omega (H or 1, C, K), which is differentiable with respect to the learned parameters."""
        fixed = self._buffers.get("omega")  # nn.Module.__getattr__ would take a microsecond
        if fixed is not None:
            return fixed
        omega, ratio = self._learned(), self._buffers.get("ratio")
        return omega if ratio is None else multiply_in_own_dtype(omega, ratio)

    def get_phase(self) -> Tensor | None:
        """Return the learned phase, (H, C) or (P, H, C) for P groups, or None if there is none."""
        if self._parameters.get("phase", self) is None:  # nn.Module.__getattr__ would take a microsecond
            return None
        return self._learned_values("phase")

    def _find_device(self) -> torch.device:
        """Return the module's device, even if its only tensor has a parametrization."""
        own = next(iter(self._owned().values()), None)
        return (self._learned() if own is None else own).device

    def _learned(self) -> Tensor:
        if "omega" in self._buffers:
            return self.omega
        return self._learned_values("omega") if "omega" in self.shapes else self._lay()

    def _learned_values(self, name: str) -> Tensor:
        """Return a learned parameter in its full shape. It may be parametrised, or a tensor in a functional call."""
        values = self._parameters.get(name)
        return (getattr(self, name) if values is None else values).reshape(self.shapes[name])

    def _theta(self) -> Tensor:
        """Return the learned theta in its full shape."""
        if "log_theta" not in self.shapes:
            return self._learned_values("theta")
        theta, sign = self._learned_values("log_theta").exp(), self._buffers.get("sign")
        return theta if sign is None else multiply_in_own_dtype(theta, sign)

    def _lay(self) -> Tensor:
        """Compute omega from theta."""
        raise NotImplementedError  # implemented by subclasses that learn theta

    def adjust(self, ratio: Tensor | None = None, amplitude: float | Tensor | None = None) -> None:
        """Multiply the trained frequencies by ``ratio`` and the amplitude by ``amplitude``, in place.

        You don't need to recompile or recapture a CUDA graph for new values, and nothing synchronises. However, the
        first call adds buffers that existing compiled code and graphs do not read, so call ``module.adjust()`` once
        before compiling or capturing. The buffers are not saved in the state_dict.

        Args:
            ratio: a tensor on the module's device that broadcasts to ω (H or 1, C, K). None restores the trained
                frequencies. Learned frequencies stay trainable.
            amplitude: factor by which to multiply the module's amplitude, a number or a tensor (C,) or (1, C). None
                means 1. Unrotated tokens are not affected.

        Raises:
            ValueError: for an invalid shape.
        """
        copy_together(self.adjusted(ratio, amplitude))

    @torch.no_grad()
    def adjusted(
        self, ratio: Tensor | None = None, amplitude: float | Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return each buffer that :meth:`adjust` changes, paired with its new value."""
        trained = self.trained()
        check_broadcast("ratio", ratio, trained.shape)
        check_broadcast("amplitude", amplitude, (1, self.num_channels))
        factor: Any = 1.0 if ratio is None else ratio
        gain: Any = 1.0 if amplitude is None else amplitude
        fixed = self._buffers.get("omega")
        frequencies = (self.ratio, torch.ones_like(self.ratio) * factor) if fixed is None else (fixed, trained * factor)
        return [frequencies, (self.amplitude, self.trained_amplitude * gain)]

    def trained(self) -> Tensor:
        """Add the buffers that :meth:`adjust` needs, and return omega (H or 1, C, K) without adjustments."""
        device = self._learned().device
        fixed = "omega" in self._buffers
        names = ("omega", "trained_omega") if fixed else ("ratio",)
        with torch.inference_mode(False), torch.no_grad():
            for name in (*names, "amplitude", "trained_amplitude"):
                own, now = self._buffers.get(name), self._buffers.get(name.removeprefix("trained_"))
                if own is not None and own.dtype == self.dtype:
                    continue
                whole = own is None and now is not None and now.dtype == self.dtype  # else FSDP1 or DDP would cast it
                value = now.clone() if whole else self._initial(name, device)  # pyright: ignore[reportOptionalMemberAccess]
                self.register_buffer(name, value, persistent=False)
        return self.trained_omega if fixed else self._learned()

    def set_places(self, axis: int, places: Tensor | None) -> None:
        """Move index i of a grid axis to position ``places[i]`` in all later calls.

        The index includes the grid's ``origin``, so a decoding step reads the place of its own token. Positions
        passed as coordinates are not affected.

        If ``places`` keeps its length, the change happens in place. You don't need to recompile or recapture a CUDA
        graph, and nothing synchronises. Each later call converts its grid to a table with :meth:`lrpe_md.Grid.along`.

        Args:
            axis: axis number; 0 is the slowest axis (time in videos).
            places: tensor (n,) with at least one position for each index of this axis. None restores the grid's
                own positions.

        Raises:
            ValueError: for an invalid axis or shape.
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
            raise ValueError(f"places: expected a 1-D tensor of real numbers, or None, got {found}")
        own = self._buffers.get(name)
        with torch.inference_mode(False), torch.no_grad():
            if own is None or own.shape != places.shape:
                own = torch.empty(places.shape, dtype=torch.float64, device=self._find_device())
                self.register_buffer(name, own, persistent=False)
            own.copy_(places, non_blocking=True)
        self.moved = tuple(sorted({*self.moved, axis}))

    def locate(self, positions: Any) -> Any:
        """Apply the places from :meth:`set_places` to a grid, and return any other positions unchanged."""
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
        **unknown: NoReturn,
    ) -> Any:
        """Encode x, or q and k, of shape (B, H, N, D). The cosine map returns (B, H, N, 2D).

        Args:
            positions: a :class:`Grid`, :class:`Coordinates` or a tensor (N, K) or (B, N, K), or a pair (for q, for k).
                For packed tokens (N, H, D), pass the result of :func:`lrpe_md.pack`.
            qkv, num_key_heads: q, k and v in one tensor, instead of xs; see :func:`lrpe_md.rotate`.
            inverse: rotate by -Θ. The cosine map does not support the inverse.
            norm: a :class:`lrpe_md.Norm` to apply to q and k in the same pass. The norm's weights stay in their own
                modules.
            out, out_start: where to write the result, such as a static key cache; see :func:`lrpe_md.rotate`.
            attend: function to call instead of encoding: the result is ``attend(self.describe(), *xs)``, with ``norm``
                in the description. Linear attention uses ``attend`` to read the frequencies while FSDP's hooks have
                gathered them.

        The result is differentiable with respect to xs and learned parameters, as for :func:`lrpe_md.rotate` and
        :func:`lrpe_md.cosine`.

        Raises:
            ValueError, TypeError: for an invalid argument, before a kernel is launched.
        """
        if unknown:
            raise TypeError(_explain_unknown_option(type(self).__name__, next(iter(unknown))))
        if attend is not None:
            return self._attend(attend, xs, positions, norm, out)
        if positions is None:
            raise TypeError(find_positional(xs, "positions") or explain_missing(self.get_omega()))
        if qkv is not None or num_key_heads is not None or type(positions) is Packed:
            again = partial(FrequencyModule.forward, self, inverse=inverse, norm=norm, out_start=out_start)
            if type(positions) is not Packed or qkv is not None or num_key_heads is not None:
                return encode_qkv(partial(again, positions=positions), xs, qkv, num_key_heads, out)
            where = unpack_positions(positions, self.dim)
            return encode_packed(partial(again, positions=where, out=order_outs(out, xs)), xs, where.num_tokens)
        if inverse and self.map == "cosine":
            raise ValueError("inverse: expected False for the cosine map, which has no inverse, got True")
        try:
            return self._encode(xs, positions, inverse, norm=norm, out=out, out_start=out_start)
        except (ValueError, TypeError):
            self._check_call(xs, positions)
            raise

    def _attend(
        self, attend: Callable[..., Any], xs: tuple[Tensor, ...], positions: Any, norm: Norm | None, out: Any
    ) -> Any:
        """Call ``attend`` with the description of this encoding; see :meth:`forward`."""
        if out is not None:
            raise ValueError("out: expected None with attend, because the encoded q and k are not returned")
        try:
            return attend(self.describe()._replace(norm=norm), *xs)
        except (ValueError, TypeError):
            self._check_call(xs, positions.positions if type(positions) is Packed else positions)
            raise

    def _check_call(self, xs: tuple[Tensor, ...], positions: Any) -> None:
        """Check the arguments of a call. The errors name the module's arguments instead of omega."""
        own, wheres = self._find_device(), positions if type(positions) is tuple else (positions,)
        for name, x in zip(("q", "k") if len(xs) == 2 else ("x",), xs, strict=False):
            if not isinstance(x, Tensor) or x.is_nested or x.ndim != 4:
                return
            if x.shape[3] != self.head_dim:
                raise ValueError(
                    f"{name}: expected head_dim={self.head_dim}, got {x.shape[3]} in a tensor of shape "
                    f"{tuple(x.shape)}; build the module with head_dim={x.shape[3]}"
                ) from None
            if x.shape[1] % self.num_heads:
                raise ValueError(
                    f"{name}: expected a number of heads divisible by num_heads={self.num_heads} (the number of key "
                    f"heads), got {x.shape[1]} in a tensor of shape {tuple(x.shape)}"
                    + (remedy_layout(x, wheres[0]) or f"; build the module with num_heads={xs[-1].shape[1]}")
                ) from None
            if x.device != own:
                raise ValueError(
                    f"{name}: expected a tensor on the module's device {own}, got {x.device}; move one of them"
                ) from None
        for where in wheres:
            if isinstance(where, Tensor):
                found = where.shape[-1] if where.ndim > 1 else self.num_axes
            else:
                found = getattr(where, "num_axes", self.num_axes)
            if found != self.num_axes:
                raise ValueError(
                    f"positions: expected {plural(self.num_axes, 'axis')} for this module, got {found}"
                    + (remedy_layout(xs[0], where) or self._axes_advice(where, found))
                ) from None

    def _axes_advice(self, positions: Any, found: int) -> str:
        """Return the advice to give in the error for positions with ``found`` axes."""
        return f"; build the module with num_axes={found}"

    def describe(self) -> Description:
        """Return the arguments that describe the current encoding to :func:`lrpe_md.linear_attention`."""
        map_: Any = self.map
        return Description(
            map_, self.get_omega(), self.act, self.dim, self._own_phase(), self.pairs, self.rotary_dim,
            self._buffers.get("amplitude"), self.order, self.impl,
        )  # fmt: skip

    def _own_phase(self) -> Any:
        """Return the phase, or (None, phase) if it applies to the keys only."""
        phase = self.get_phase()
        if phase is None:
            return None
        if self.phase_range is not None:
            # Clamp without blocking the gradient. Otherwise a phase at or beyond its bounds would never move again.
            phase = phase + (phase.clamp(*self.phase_range) - phase).detach()
        return (None, phase) if self.keys_alone else phase

    def _encode(self, xs: tuple[Tensor, ...], positions: Any, inverse: bool = False, **options: Any) -> Any:
        phase: Any = self._own_phase()
        if type(phase) is tuple and len(xs) != 2:
            raise ValueError(
                f"xs: expected both q and k, because only the keys have a phase, got {plural(len(xs), 'tensor')}"
            )
        omega, amplitude = self.get_omega(), self._buffers.get("amplitude")
        positions = self.locate(positions) if self.moved else positions
        encode: Any = cosine if self.map == "cosine" else rotate
        form: Any = {"order": self.order} if encode is cosine else {"pairs": self.pairs, "inverse": inverse}
        return encode(
            *xs, omega=omega, positions=positions, rotary_dim=self.rotary_dim, act=self.act, dim=self.dim, phase=phase,
            amplitude=amplitude, impl=self.impl, **form, **options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        text = f", num_heads={self.num_heads}" if self.num_heads > 1 else ""
        text += f", learnable={self.learnable!r}" if self.learnable else ""
        if self.phase is not None:
            text += f", phase={'k' if self.keys_alone else True!r}"
        text += f", phase_groups={self.phase_groups}" if self.phase_groups > 1 else ""
        text += f", pairs={self.pairs!r}" if self.map == "rotate" else ""
        text += f", rotary_dim={self.rotary_dim}" if self.rotary_dim is not None else ""
        text += ", amplitude=True" if self.gain is not None else ""
        return text + (f", act={self.act!r}" if self.act != "none" else "")


class SeriesModule(FrequencyModule):
    """Encoding whose frequencies come from a base (axial blocks or random directions) or from a function."""

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
        rotary_dim: int | slice | None = None,
        act: Act = "none",
        dim: int | None = None,
        phase: Phase = False,
        phase_groups: int = 1,
        seed: int = 0,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_at_least(1, head_dim=head_dim)
        self.head_dim, self.rotary_dim = head_dim, rotary_dim
        _, width = rotary_slice(rotary_dim, head_dim, even=self.map == "rotate")
        num_channels = width // 2 if self.map == "rotate" else width
        if not callable(frequencies) and frequencies not in ("axial", "mixed"):
            raise ValueError(
                "frequencies: expected 'axial', 'mixed' or a function (channels, heads, seed) -> omega, "
                f"got {show_value(frequencies)}"
                + (
                    "; pass a function that returns this tensor"
                    if isinstance(frequencies, Tensor)
                    else "; for a preset or a Scheme, use PresetMd"
                )
            )
        check_one_of("axis_order", axis_order, AXIS_ORDERS)
        if as_integer(seed) is None:
            raise ValueError(f"seed: expected an integer, got {show_value(seed)}")
        default = DEFAULT_BASES["mixed" if frequencies == "mixed" else "axial"]
        self.frequencies, self.base, self.seed = frequencies, default if base is None else base, seed
        self.axis_order: AxisOrder = axis_order
        super().__init__(
            num_channels, num_axes, num_heads, axial=frequencies == "axial", learnable=learnable, phase=phase, act=act,
            dim=dim, impl=impl, device=device, dtype=dtype, phase_groups=phase_groups,
        )  # fmt: skip
        if frequencies == "axial":
            widths = cut_blocks([math.ceil(num_channels / num_axes)] * num_axes, num_channels, num_axes)
            widths = widths if axis_order == "major_first" else widths[::-1]
            map_ = ', map="cosine"' if self.map == "cosine" else ""  # a scheme rotates by default
            remedy = f"PresetMd(Scheme(..., Axial(split){map_})), or with split= in the encoding_kwargs of a model"
            warn_of_idle_axes(widths, remedy=remedy)
        elif self.learnable and self.phase is None and self.shapes["omega"][0] < num_heads:
            warn_of_shared_heads(num_heads, "this function", "return omega (num_heads, channels, K)")

    def _initial_frequencies(self, name: str) -> Tensor:
        if callable(self.frequencies):
            args = {"channels": self.num_channels, "heads": self.num_heads, "seed": self.seed}
            shapes = tuple((heads, self.num_channels, self.num_axes) for heads in (1, self.num_heads))
            omega = call_function("frequencies", self.frequencies, args, shapes)
            check_frequencies("frequencies", omega)
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

    def _series_repr(self) -> str:
        """Return the arguments that determine the frequencies."""
        if callable(self.frequencies):
            return f"frequencies={getattr(self.frequencies, '__name__', type(self.frequencies).__name__)}"
        return f"frequencies={self.frequencies!r}, base={self.base:g}"

    def extra_repr(self) -> str:
        text = f"head_dim={self.head_dim}, num_axes={self.num_axes}, {self._series_repr()}"
        if self.frequencies == "axial" and self.num_axes > 1:
            text += f", axis_order={self.axis_order!r}"
        return text + super().extra_repr()
