"""Change the frequencies, amplitudes and places of a whole model between two steps of diffusion or streaming.

The functions work for models with our encodings (``adapt``, ``models.vit``, ``models.video``, ``models.dit``,
``models.lm``). They also work for models from other libraries whose tables follow a known formula: timm's ViTs with
fixed frequencies, diffusers' FLUX, Wan, HunyuanVideo and models with the same rotary modules, and vision towers of
transformers. To scale a language model, change its configuration instead.

Modules of other libraries still compute their own tables, which we rotate by the change in the angles. This change is
exactly zero until you change frequencies or places.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..frequencies.series import apply_scaling, geometric_theta
from ..modules.base import FrequencyModule, copy_together
from ..modules.encodings import RotateMd
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from ..presets.scheme import Scaling
from .copies import derive_class, find_method
from .rotary import parts

__all__ = ["Scaled", "prepare_scaling", "set_places", "set_scaling"]

Scalings = Scaling | Sequence[Scaling | None] | None
_BOUND = 1e-4  # tolerance of table entries: some modules compute angles in float32


class Scaled(NamedTuple):
    """Prepared frequencies and amplitudes from :func:`prepare_scaling`."""

    pairs: list[tuple[Tensor, Tensor]]

    def apply(self) -> None:
        """Copy the values into the model, with one launch per dtype and without synchronisation."""
        with torch.no_grad():
            copy_together(self.pairs)


def set_scaling(model: Any, scaling: Scalings) -> None:
    """Scale the trained frequencies of all encodings in ``model``, in place.

    Nothing synchronises, and you don't need to recompile or recapture a CUDA graph. However, the first call adds
    buffers to the model, outside of its state_dict. Therefore, call ``set_scaling(model, None)`` once before
    ``torch.compile`` or a CUDA graph capture. Frozen programs (exported, or compiled with Inductor's ``freezing``) keep
    their values.

    Args:
        model: a module with encodings, or a diffusers pipeline.
        scaling: a function of theta (E,), or (H, E) if heads differ, such as a ``*_scaling`` function from
            ``lrpe_md.frequencies`` with its arguments bound. The function returns a scaled theta of the same shape, and
            an amplitude, which is a number or (E,). Pass one function for all axes, or one per axis, slowest first,
            with None for unchanged axes. Each function receives the frequencies of an axis in channel order, in float64
            on the model's device. None restores the trained frequencies. Learned frequencies stay trainable.

    An amplitude only affects the pairs of its own axis, and only in rotated tokens. A prefix, such as text that a
    preset places at zero, keeps an amplitude of 1.

    Raises:
        ValueError: if there is no encoding, the number of axes is wrong, frequencies combine several axes (mixed), or
            the model is an adapted language model.
    """
    prepare_scaling(model, scaling).apply()


@torch.no_grad()
def prepare_scaling(model: Any, scaling: Scalings) -> Scaled:
    """Prepare the changes of :func:`set_scaling`, so that ``prepare_scaling(...).apply()`` in a loop costs one launch.

    The result depends on the current frequencies and device, so call this again after an optimiser step or ``.to``.

        steps = [prepare_scaling(dit, (partial(dype_ntk_scaling, factor=2.0, time=t),) * 2) for t in times]
        for step, t in zip(steps, times):
            step.apply()
            ...
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for path, module in _find(model).items():
        by_axis: list[Any] = list(scaling) if isinstance(scaling, (list, tuple)) else [scaling] * module.num_axes
        if len(by_axis) != module.num_axes:
            raise ValueError(
                f"scaling: expected one value for each of the {module.num_axes} axes of {path}, got {len(by_axis)}"
            )
        pairs += module.adjusted(*_compute_scaling(path, module, by_axis))
    return Scaled(pairs)


def set_places(model: Any, axis: int, places: Tensor | None) -> None:
    """In all encodings, move index i of a grid axis to position ``places[i]``. None restores the original positions.

    Use this for coordinates that change between steps, such as the :func:`lrpe_md.positions.relative_times` of a
    stream, or for a jump between scenes. See :meth:`FrequencyModule.set_places`.

    Raises:
        ValueError: if there is no encoding, an encoding lacks the axis, places don't have the shape (n,), or the model
            receives coordinates instead of a grid, as FLUX does.
    """
    modules = {path: module for path, module in _find(model).items() if module.num_axes > 1}  # text has one axis
    if not modules:
        raise ValueError(f"model: expected a model with image or video encodings, found none in {type(model).__name__}")
    for path, module in modules.items():
        if not 0 <= axis < module.num_axes:
            raise ValueError(f"axis: expected a number from 0 to {module.num_axes - 1} for {path}, got {axis}")
    for module in modules.values():
        module.set_places(axis, places)


def _find(model: Any) -> dict[str, Any]:
    """Return all encodings by name. If there are none, add encodings to the modules that compute tables."""
    modules = {path: part for path, part in parts(model).items() if isinstance(part, nn.Module)}
    found: dict[str, Any] = {path: m for path, m in modules.items() if isinstance(m, FrequencyModule)}
    if not found:
        made = _stand_in({path: m for path, m in modules.items() if _makes_tables(m)}, _device_of(modules))
        found = {f"{path}.rotation".strip("."): own for path, own in made.items()}
    if not found:
        raise ValueError(f"model: expected a model with encodings, found none in {type(model).__name__}")
    return {path or type(model).__name__: module for path, module in found.items()}


def _device_of(modules: dict[str, nn.Module]) -> torch.device:
    """Return the device that a model runs on, even if accelerate has offloaded its parameters to the meta device."""
    hooks = [vars(module).get("_hf_hook") for module in modules.values()]
    devices = [device for hook in hooks if (device := getattr(hook, "execution_device", None)) is not None]
    if devices:
        return torch.device(devices[0])
    return next((p.device for module in modules.values() for p in module.parameters()), torch.device("cpu"))


def _compute_scaling(path: str, module: Any, scalings: list[Scaling | None]) -> tuple[Tensor | None, Any]:
    """Return the factors for a module's frequencies (H, C, K), and its amplitude (1, C)."""
    if not any(scalings):
        return None, None
    trained = module.trained().double()
    ratio = torch.ones_like(trained)
    gain = torch.ones_like(ratio[:1, :, 0])
    for axis, (scaling, channels) in enumerate(zip(scalings, _channels(path, module, trained), strict=True)):
        if scaling is not None and channels.numel():
            theta = trained[:, channels, axis]
            scaled, amplitude = apply_scaling(scaling, theta[0] if len(theta) == 1 else theta)
            factors = torch.where(theta == 0, 1.0, scaled.reshape(theta.shape) / theta)
            ratio[:, :, axis].index_copy_(1, channels, factors)
            gain.index_copy_(1, channels, torch.ones_like(factors[:1]) * amplitude)
    return ratio, gain


def _channels(path: str, module: Any, trained: Tensor) -> list[Tensor]:
    # The channels of each axis are read once per device. Channels with frequency 0 belong to no axis.
    known = vars(module).setdefault("_channels_of_axes", {})
    if trained.device not in known:
        used = (trained != 0).any(0)
        combined = bool(((trained != 0).sum(-1) > 1).any())
        if combined or bool((used.sum(-1) > 1).any()) or (used.shape[-1] > 1 and bool((used != (trained != 0)).any())):
            raise ValueError(
                "scaling: expected frequencies with one axis per channel, the same for all heads, got "
                f"{'mixed frequencies' if combined else 'axes that differ between heads'} in {path}; build this "
                "encoding with axial frequencies, or move its positions with set_places"
            )
        known[trained.device] = [column.nonzero()[:, 0] for column in used.unbind(-1)]
    return known[trained.device]


# --- tables of other libraries ---------------------------------------------------------------------------------------


def _angles(where: Any, omega: Tensor, device: torch.device) -> Tensor:
    """Return angles (N, C) in float64, without matrix products, which autocast and TF32 would affect."""
    where = where.explicit(device) if isinstance(where, Grid) else where
    return (where.coords.to(device, torch.float64)[..., None, :] * omega.to(device)).sum(-1)


class Formula(NamedTuple):
    """Formula for a module's tables, which are cos and sin, or one tensor with sines followed by cosines."""

    omega: Tensor  # (C, K) in float64
    locate: Callable[..., Grid | Coordinates]  # (module, settings, *arguments of the method) -> positions of the tokens
    settings: Any
    order: str = "interleaved"  # or "half"
    method: str = "forward"  # returns the tables

    def return_omega(self, channels: int, heads: int, seed: int) -> Tensor:
        return self.omega[None]

    def agrees(self, rope: Any, args: Sequence[Any], precision: float = 0.0) -> bool:
        """Return whether the module's tables equal the formula, up to rounding in their dtype or ``precision``."""
        try:
            made = _split(getattr(type(rope), self.method)(rope, *args))  # without the hooks of accelerate
        except (TypeError, ValueError, RuntimeError):  # another model's module, with different arguments
            return False
        angles = _angles(self.locate(rope, self.settings, *args), self.omega, torch.device("cpu"))
        bound = max(_BOUND, 4 * torch.finfo(made[0].dtype).eps, precision)
        pairs = zip(made, (angles.cos(), angles.sin()), strict=True)
        return all(t.shape[-1] == 2 * a.shape[-1] and (t - self.expand(a, t)).abs().max() < bound for t, a in pairs)

    def expand(self, t: Tensor, like: Tensor) -> Tensor:
        """Expand (N, C) to the shape of a table, (..., 2 C)."""
        t = t.repeat_interleave(2, -1) if self.order == "interleaved" else torch.cat([t, t], -1)
        return t.reshape(*like.shape[:-1], t.shape[-1])


class TableFrequencies(RotateMd):
    """Frequencies of a module that computes tables. The frequencies stay in float64 if the model is cast."""

    def __init__(self, formula: Formula, device: torch.device | str | None = None) -> None:
        self.formula = formula
        channels, num_axes = formula.omega.shape
        super().__init__(2 * channels, num_axes, frequencies=formula.return_omega, device=device, dtype=torch.float64)

    def get_omega(self) -> Tensor:
        omega = super().get_omega()
        if omega.dtype != self.dtype:  # FSDP1 and DDP cast buffers through their data
            if "trained_omega" in self._buffers:
                raise ValueError(
                    f"omega: expected {self.dtype}, got {omega.dtype}: the model's buffers were cast after its "
                    "frequencies were changed; set the frequencies again"
                )
            self.omega = omega = self._initial("omega", omega.device)
        return omega

    def set_places(self, axis: int, places: Tensor | None) -> None:
        if self.formula.locate is _locate_ids and places is not None:
            raise ValueError(
                "places: expected None for a model that receives coordinates, such as FLUX's img_ids, got "
                f"{type(places).__name__}; change the coordinates that you pass to the model"
            )
        super().set_places(axis, places)

    def change_tables(self, rope: Any, made: Any, *args: Any) -> Any:
        """Return the tables that ``rope`` made, rotated by the change in the angles and scaled by the amplitudes."""
        (cos, sin), omega, is_scaled = _split(made), self.get_omega(), "trained_omega" in self._buffers
        where = self.formula.locate(rope, self.formula.settings, *args)
        trained = _angles(where, self.trained_omega[0] if is_scaled else omega[0], cos.device)
        change = _angles(self.locate(where), omega[0], cos.device) - trained
        if _draws_positions(rope) and not torch.compiler.is_compiling() and change.any():
            raise ValueError(
                f"model: expected frequencies and places as trained while {type(rope).__name__} draws random positions "
                "in training, got changed ones; call set_scaling(model, None) and set_places(model, axis, None), or "
                "call model.eval()"
            )
        gain = self.amplitude if is_scaled else torch.ones_like(omega[..., 0])
        wide = torch.promote_types(cos.dtype, torch.float32)
        by_cos, by_sin = (self.formula.expand((t * gain).to(wide), cos) for t in (change.cos(), change.sin()))
        cos, sin = (cos * by_cos - sin * by_sin).to(cos.dtype), (sin * by_cos + cos * by_sin).to(sin.dtype)
        return torch.cat([sin, cos], -1) if isinstance(made, Tensor) else (cos, sin)


_Found: TypeAlias = tuple[Formula, tuple[Any, ...]] | None


def _split(made: Any) -> tuple[Tensor, Tensor]:
    cos, sin = reversed(made.chunk(2, -1)) if isinstance(made, Tensor) else made
    return cos, sin


def _draws_positions(rope: Any) -> bool:
    """Return whether DINOv3's module shifts, jitters or rescales its coordinates in this mode."""
    config = getattr(rope, "config", None)
    names = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
    draws = getattr(rope, "aug_active", False) or any(getattr(config, name, None) is not None for name in names)
    return draws and getattr(rope, "training", False)


def _axial(*series: Tensor) -> Tensor:
    return torch.block_diag(*[s.double()[:, None] for s in series])


def _powers(dims: Sequence[int], base: float) -> Tensor:
    return _axial(*[geometric_theta(dim // 2, base) for dim in dims])


def _locate_ids(rope: Any, settings: tuple[int, bool], *args: Any) -> Coordinates:
    index, axes_first = settings  # of the positions (N, K), or (K, N) with axes first
    return Coordinates((args[index].T if axes_first else args[index]).float())


def _locate_patches(rope: Any, settings: tuple[Sequence[int], Any], x: Tensor, *args: Any) -> Grid:
    patch, by = settings  # patch size, and the rule of the coordinates
    grid = Grid(tuple(n // p for n, p in zip(x.shape[-len(patch) :], patch, strict=True)))
    return grid if by is None else grid.cells(by)


def _locate_timm(rope: Any, by: Any, shape: Any = None, *args: Any) -> Grid:
    grid = Grid(tuple(rope.feat_shape if shape is None else shape)).offset(rope.grid_offset)
    if by is not None:
        return grid.cells(by)
    return grid if rope.ref_feat_shape is None else grid.interpolate(rope.ref_feat_shape)


# Each function returns a module's formula on the CPU and arguments to check it with, or None for other modules.


def _read_ids(rope: Any) -> _Found:
    # diffusers' FLUX and similar models, with ids (N, K) for text and image
    if not (hasattr(rope, "axes_dim") and hasattr(rope, "theta")):
        return None
    ids = torch.arange(3.0)[:, None] + torch.arange(len(rope.axes_dim))
    return Formula(_powers(rope.axes_dim, rope.theta), _locate_ids, (0, False)), (ids,)


def _read_patches(rope: Any) -> _Found:
    """Read the formula of diffusers' HunyuanVideo and Wan (video inputs) or transformers' DINOv3 (image inputs)."""
    by, order = None, "interleaved"
    if hasattr(rope, "rope_dim") and hasattr(rope, "patch_size_t"):
        omega, patch = _powers(rope.rope_dim, rope.theta), (rope.patch_size_t, rope.patch_size, rope.patch_size)
    elif hasattr(rope, "t_dim") and hasattr(rope, "freqs_cos"):
        omega, patch = _powers((rope.t_dim, rope.h_dim, rope.w_dim), 1e4), rope.patch_size  # base is not stored
    elif hasattr(rope, "num_patches_h") and hasattr(rope, "inv_freq"):
        series, size = 2 * math.pi * rope.inv_freq.double(), rope.config.patch_size
        omega, patch = _axial(series, series), (size, size) if isinstance(size, int) else size
        by, order = "axis", "half"
    else:
        return None
    x = torch.zeros(1, 1, *(n * p for n, p in zip((2, 3, 2), patch, strict=False)))
    return Formula(omega, _locate_patches, (tuple(patch), by), order), (x,)


def _read_timm(rope: Any) -> _Found:
    is_dino = hasattr(rope, "periods")
    series = 2 * math.pi / rope.periods.double() if is_dino else getattr(rope, "bands", None)
    if series is None or not hasattr(rope, "grid_indexing") or getattr(rope, "in_pixels", False):
        return None
    omega = _axial(series, series)
    by = {"separate": "axis", "min": "shorter", "max": "longer"}[rope.normalize_coords] if is_dino else None
    order = "half" if getattr(rope, "rotate_half", is_dino) else "interleaved"
    shape = getattr(rope, "feat_shape", None)
    omega = omega.flip(-1) if rope.grid_indexing == "xy" else omega
    return Formula(omega, _locate_timm, by, order, "get_embed"), ([2, 3] if shape is None else list(shape),)


def _read_places(rope: Any) -> _Found:
    """Read the formula of transformers' vision towers, which take patch positions (N, K) or (K, N)."""
    code = getattr(find_method(type(rope), "forward"), "__code__", None)
    if code is None or code.co_varnames[1:3] != ("x", "position_ids") or not hasattr(rope, "inv_freq"):
        return None
    for num_axes, axes_first in ((2, False), (2, True), (3, False), (3, True)):
        steps = torch.cat([torch.zeros(2, num_axes), torch.eye(num_axes)]).long()  # (N, K)
        try:
            cos, sin = type(rope).forward(rope, torch.zeros(1), steps.T if axes_first else steps)
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        if cos.ndim == 2 and len(cos) == len(steps):
            angles = torch.atan2(sin.double(), cos.double())[2:].T
            half = angles[: len(angles) // 2]
            is_half = torch.equal(half, angles[len(half) :])
            omega, order = (half, "half") if is_half else (angles[::2], "interleaved")
            places = torch.arange(5)[:, None] + torch.arange(num_axes)
            args = torch.zeros(1), places.T if axes_first else places
            return Formula(omega, _locate_ids, (1, axes_first), order), args
    return None


@torch.no_grad()
def _read_formula(path: str, module: nn.Module) -> Formula:
    twin = copy.deepcopy(module) if any(b.is_meta for b in module.buffers()) else copy.deepcopy(module).cpu().eval()
    with torch.device("cpu"):
        for read in (_read_ids, _read_patches, _read_timm, _read_places):
            if (found := read(twin)) is not None and found[0].agrees(twin, found[1]):
                return found[0]
            if found is not None and found[0].agrees(twin, found[1], 4 * torch.finfo(torch.bfloat16).eps):
                raise ValueError(
                    f"{path}: expected {type(module).__name__}'s tables in full precision, got tables rounded to 16 "
                    "bits, as after model.bfloat16().float(); load the model again in the dtype that you want"
                )
    raise ValueError(
        f"{path}: expected a module whose tables are known, got {type(module).__name__}; for a language model, set "
        "rope_parameters in its configuration before you load the model; for any other module, change its frequencies "
        "or the coordinates that it receives (for LTX, with rope_interpolation_scale)"
    )


def _makes_tables(module: Any) -> bool:
    """Return whether a module seems to compute cos and sin tables, unlike an attention layer with a rotary name."""
    if any(isinstance(part, nn.Linear) for part in module.modules()):
        return False
    name = type(module).__name__.lower()
    return "rope" in name or "rotary" in name or (hasattr(module, "axes_dim") and hasattr(module, "theta"))


class StandIn(NamedTuple):
    """Recipe for a class whose tables follow the :class:`TableFrequencies` that each object has as ``rotation``."""

    method: str

    def derive(self, cls: type) -> Any:
        methods = {self.method: _with_changes(getattr(cls, self.method))}
        if hasattr(cls, "get_batch_embeds"):
            methods["get_batch_embeds"] = _by_grid(cls.get_batch_embeds)
        return derive_class(cls, tuple((n, (m, None)) for n, m in methods.items()), self)

    def attach(self, path: str, module: Any, rotation: TableFrequencies) -> None:
        """Make the tables of a module follow these frequencies, even if accelerate has hooked or unhooked it."""
        for name, method in _find_bound(path, module, self.method).items():
            vars(module)[name] = MethodType(_with_changes(method.__func__), module)
        module.rotation = rotation
        module.__class__ = self.derive(type(module))

    def detach(self, module: Any) -> TableFrequencies:
        """Remove and return the module's frequencies. The caller restores the class and the methods."""
        return module._modules.pop("rotation")


@functools.cache
def _with_changes(method: Any) -> Any:
    @functools.wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rotation.change_tables(self, method(self, *args, **kwargs), *args, *kwargs.values())

    return changed


@functools.cache
def _by_grid(method: Any) -> Any:
    """Make timm's ``get_batch_embeds`` compute each grid with ``get_embed``, instead of slicing the largest grid."""

    @functools.wraps(method)
    def by_grid(self: Any, shapes: Sequence[Any], seq_len: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.feat_shape is not None:  # raises an error if the module caches the table of a single grid
            return method(self, shapes, seq_len, *args, **kwargs)
        tables = [self.get_embed(shape, *args, **kwargs) for shape in shapes]
        if seq_len is None or not tables:
            return tables
        padded = tables[0].new_zeros(len(tables), seq_len, tables[0].shape[-1])
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return padded

    return by_grid


def _stand_in(modules: Mapping[str, Any], device: torch.device) -> dict[str, TableFrequencies]:
    """Make the tables of modules follow frequencies that can be scaled. Return these frequencies by module name.

    ``device`` is the device for a module without tensors. If any module has no known formula, none of them is changed.
    """
    formulas = {path: _read_formula(path, module) for path, module in modules.items()}
    for path, formula in formulas.items():
        _find_bound(path, modules[path], formula.method)
    made: dict[str, TableFrequencies] = {}
    for path, formula in formulas.items():
        tensors = [*modules[path].parameters(), *modules[path].buffers()]
        made[path] = TableFrequencies(formula, tensors[0].device if tensors else device)
        StandIn(formula.method).attach(path, modules[path], made[path])
    return made


def _find_bound(path: str, module: Any, method: str) -> dict[str, Any]:
    """Return the object's own attributes that hold its class's method, as accelerate's hooks store it."""
    own = find_method(type(module), method)
    bound = {n: v for n, v in vars(module).items() if isinstance(v, MethodType) and v.__func__ is own}
    if method in vars(module) and not bound:
        raise ValueError(
            f"{path}: expected a module with the {method} method of its class, {type(module).__name__}, got a "
            f"replaced {method}; call set_scaling(model, None) before you replace the method, and before "
            "diffusers adds hooks (for example for group offloading)"
        )
    return bound
