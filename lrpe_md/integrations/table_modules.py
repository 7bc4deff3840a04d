"""Frequencies of other libraries' rotary modules, for :mod:`.run_time` to scale.

Each module still computes its own tables, which we rotate by the change in the angles. This change is exactly zero
until you change frequencies or places. Frequencies and positions come from a known formula, which we compare with the
module's tables.
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

from ..modules.encodings import RotateMd
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from .copies import derive_class, find_method, recipe_of

__all__ = ["TableFrequencies", "attach", "detach", "makes_tables", "stand_in"]

_BOUND = 1e-4  # tolerance of table entries: some modules compute angles in float32


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

    def agrees(self, rope: Any, args: Sequence[Any]) -> bool:
        try:
            made = _split(getattr(type(rope), self.method)(rope, *args))  # without the hooks of accelerate
        except (TypeError, ValueError, RuntimeError):  # another model's module, with different arguments
            return False
        angles = _angles(self.locate(rope, self.settings, *args), self.omega, torch.device("cpu"))
        bound = max(_BOUND, 4 * torch.finfo(made[0].dtype).eps)
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
    return _axial(*[float(base) ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim) for dim in dims])


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
def read_formula(path: str, module: nn.Module) -> Formula:
    twin = copy.deepcopy(module) if any(b.is_meta for b in module.buffers()) else copy.deepcopy(module).cpu().eval()
    with torch.device("cpu"):
        for read in (_read_ids, _read_patches, _read_timm, _read_places):
            if (found := read(twin)) is not None and found[0].agrees(twin, found[1]):
                return found[0]
    raise ValueError(
        f"{path}: expected a module whose tables are known, got {type(module).__name__}; for a language model, set "
        "rope_parameters in its configuration before you load the model; for any other module, change its frequencies "
        "or the coordinates that it receives (for LTX, with rope_interpolation_scale)"
    )


def makes_tables(module: Any) -> bool:
    """Return whether a module seems to compute cos and sin tables, unlike an attention layer with a rotary name."""
    if any(isinstance(part, nn.Linear) for part in module.modules()):
        return False
    name = type(module).__name__.lower()
    return "rope" in name or "rotary" in name or (hasattr(module, "axes_dim") and hasattr(module, "theta"))


class StandIn(NamedTuple):
    method: str

    def derive(self, cls: type) -> Any:
        methods = {self.method: _with_changes(getattr(cls, self.method))}
        if hasattr(cls, "get_batch_embeds"):
            methods["get_batch_embeds"] = _by_grid(cls.get_batch_embeds)
        return derive_class(cls, tuple((n, (m, None)) for n, m in methods.items()), self)


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


def stand_in(modules: Mapping[str, Any], device: torch.device) -> dict[str, TableFrequencies]:
    """Make the tables of modules follow frequencies that can be scaled. Return these frequencies by module name.

    ``device`` is the device for a module without tensors. If any module has no known formula, none of them is changed.
    """
    formulas = {path: read_formula(path, module) for path, module in modules.items()}
    for path, formula in formulas.items():
        _find_bound(path, modules[path], formula.method)
    made: dict[str, TableFrequencies] = {}
    for path, formula in formulas.items():
        tensors = [*modules[path].parameters(), *modules[path].buffers()]
        made[path] = TableFrequencies(formula, tensors[0].device if tensors else device)
        attach(path, modules[path], made[path])
    return made


def attach(path: str, module: Any, rotation: TableFrequencies) -> None:
    """Make the tables of a module follow these frequencies, even if accelerate has hooked or unhooked the module."""
    for name, method in _find_bound(path, module, rotation.formula.method).items():
        vars(module)[name] = MethodType(_with_changes(method.__func__), module)
    module.rotation = rotation
    module.__class__ = StandIn(rotation.formula.method).derive(type(module))


def detach(part: Any) -> TableFrequencies | None:
    """Remove and return the frequencies that :func:`attach` added, or return None. The caller restores all methods."""
    return part._modules.pop("rotation") if isinstance(recipe_of(type(part)), StandIn) else None


def _find_bound(path: str, module: Any, method: str) -> dict[str, Any]:
    """Return the attributes in which an object, such as one that accelerate has hooked, stores its class's method."""
    own = find_method(type(module), method)
    bound = {n: v for n, v in vars(module).items() if isinstance(v, MethodType) and v.__func__ is own}
    if method in vars(module) and not bound:
        raise ValueError(
            f"{path}: expected a module with the {method} method of its class, {type(module).__name__}, got a "
            f"replaced {method}; call set_scaling(model, None) before you replace the method, and before "
            "diffusers adds hooks (for example for group offloading)"
        )
    return bound
