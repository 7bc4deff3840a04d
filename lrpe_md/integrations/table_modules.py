"""Modules of other libraries that make cos and sin: their frequencies, to be scaled at run time (run_time.py).

A module goes on making its tables. What ``set_scaling`` and ``set_places`` change is turned onto them: by the
difference of the angles, which is exactly zero where nothing was changed. The frequencies and positions are those of a
formula that is known for the module, and that was compared with its tables.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..modules import RotateMd
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from .copies import derive_class, find_method

__all__ = ["TableFrequencies", "UnknownTablesError", "makes_tables", "stand_in"]

_BOUND = 1e-4  # of entries of a table: modules that form angles in float32 round them


class UnknownTablesError(ValueError):
    """A module whose tables follow from no formula that is known here."""


class TableFrequencies(RotateMd):
    """The frequencies of a module that makes tables; float64 whatever the model is cast to.

    Args:
        omega: (C, K).
        device: of the frequencies.
    """

    def __init__(self, omega: Tensor, device: torch.device | str | None = None) -> None:
        channels, num_axes = omega.shape
        given = functools.partial(_given, omega)
        super().__init__(2 * channels, num_axes, frequencies=given, device=device, dtype=torch.float64)

    def get_omega(self) -> Tensor:
        omega = super().get_omega()
        if omega.dtype != self.dtype:  # FSDP1 and DDP cast buffers by their data
            if "trained_omega" in self._buffers:
                raise ValueError(
                    f"omega: expected {self.dtype}, got {omega.dtype}: the model's buffers were cast after its "
                    "frequencies were changed; change them again"
                )
            self.omega = omega = self._initial("omega", omega.device)
        return omega

    def difference(self, where: Grid | Coordinates, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the change of the angles (N, C), and the amplitudes (1, C)."""
        if self.moved and not isinstance(where, Grid):
            raise ValueError(
                f"places: expected None for axes {list(self.moved)} of a model that is given coordinates; change those"
            )
        omega = self.get_omega()
        is_scaled = "trained_omega" in self._buffers
        trained = self.trained_omega if is_scaled else omega
        gain = self.amplitude if is_scaled else torch.ones_like(omega[..., 0])
        return _angles(self.locate(where), omega[0], device) - _angles(where, trained[0], device), gain


def _given(omega: Tensor, channels: int, heads: int, seed: int) -> Tensor:
    return omega[None]


def _angles(where: Any, omega: Tensor, device: torch.device) -> Tensor:
    """(N, C), float64; no product of matrices, which autocast and TF32 would touch."""
    where = where.explicit(device) if isinstance(where, Grid) else where
    return (where.coords.to(device, torch.float64)[..., None, :] * omega.to(device)).sum(-1)


# --- what is known ---------------------------------------------------------------------------------------------------


class Formula:
    """What a module's tables follow from: frequencies (C, K), and positions from the arguments of its method.

    Args:
        omega: (C, K), float64.
        order: of the entries of a table, "interleaved" or "half".
        settings: what :meth:`locate` needs beside.
    """

    method: ClassVar[str] = "forward"
    sin_first: ClassVar[bool] = False  # one tensor, sines before cosines

    def __init__(self, omega: Tensor, order: str = "interleaved", settings: Any = None) -> None:
        self.omega, self.order, self.settings = omega, order, settings

    @classmethod
    def read(cls, rope: Any) -> Formula | None:
        """Return the formula of a module on the CPU, or None where this is another kind of module."""
        raise NotImplementedError

    def locate(self, rope: Any, *args: Any) -> Grid | Coordinates:
        """Return where the tokens are."""
        raise NotImplementedError

    def sample(self, rope: Any) -> tuple[Any, ...]:
        """Return arguments of the method, for a comparison."""
        raise NotImplementedError

    def lay(self, t: Tensor, like: Tensor) -> Tensor:
        """Bring (N, C) into the shape of a table, (.., W)."""
        t = t.repeat_interleave(2, -1) if self.order == "interleaved" else torch.cat([t, t], -1)
        return t.reshape(*like.shape[:-1], t.shape[-1])

    def split(self, made: Any) -> tuple[Tensor, Tensor]:
        """Return cos and sin."""
        if not self.sin_first:
            return made
        sin, cos = made.chunk(2, -1)
        return cos, sin

    def turn(self, rope: Any, made: Any, *args: Any) -> Any:
        """Return the tables that a module made, with what was changed."""
        cos, sin = self.split(made)
        change, gain = rope.rotation.difference(self.locate(rope, *args), cos.device)
        wide = torch.promote_types(cos.dtype, torch.float32)
        by_cos, by_sin = (self.lay((t * gain).to(wide), cos) for t in (change.cos(), change.sin()))
        cos, sin = (cos * by_cos - sin * by_sin).to(cos.dtype), (sin * by_cos + cos * by_sin).to(sin.dtype)
        return torch.cat([sin, cos], -1) if self.sin_first else (cos, sin)


def _axial(dims: Any, base: float) -> Tensor:
    """A series for each axis, one after another, (C, K)."""
    series = [float(base) ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim) for dim in dims]
    return torch.block_diag(*[s[:, None] for s in series])


class Ids(Formula):
    """diffusers' FLUX and its like: ids (N, K) of text and image."""

    @classmethod
    def read(cls, rope: Any) -> Formula | None:
        known = hasattr(rope, "axes_dim") and hasattr(rope, "theta")
        return cls(_axial(rope.axes_dim, rope.theta)) if known else None

    def locate(self, rope: Any, *args: Any) -> Coordinates:
        return Coordinates(args[0].float())

    def sample(self, rope: Any) -> tuple[Any, ...]:
        return (torch.arange(3.0)[:, None] + torch.arange(self.omega.shape[1]),)


class Video(Formula):
    """diffusers' HunyuanVideo and Wan: a video (B, C, T, H, W); settings: the size of a patch."""

    @classmethod
    def read(cls, rope: Any) -> Formula | None:
        if hasattr(rope, "rope_dim") and hasattr(rope, "patch_size_t"):
            patch = (rope.patch_size_t, rope.patch_size, rope.patch_size)
            return cls(_axial(rope.rope_dim, rope.theta), settings=patch)
        if not hasattr(rope, "t_dim") or not hasattr(rope, "freqs_cos"):
            return None
        usual = _axial((rope.t_dim, rope.h_dim, rope.w_dim), 1e4)  # it keeps tables, and no base
        sin, cos = rope.freqs_sin[1, ::2].double(), rope.freqs_cos[1, ::2].double()
        if (sin - usual.sum(-1).sin()).abs().max() > 4 * torch.finfo(rope.freqs_sin.dtype).eps:
            usual = (usual != 0) * torch.atan2(sin, cos)[:, None]
        return cls(usual, settings=tuple(rope.patch_size))

    def locate(self, rope: Any, *args: Any) -> Grid:
        return Grid(tuple(n // p for n, p in zip(args[0].shape[2:], self.settings, strict=True)))

    def sample(self, rope: Any) -> tuple[Any, ...]:
        return (torch.zeros(1, 1, *(n * p for n, p in zip((2, 3, 2), self.settings, strict=True))),)


class TimmGrid(Formula):
    """timm's axial tables and DINOv3's, of a grid (H, W)."""

    method = "get_embed"
    sin_first = True

    @classmethod
    def read(cls, rope: Any) -> Formula | None:
        if not hasattr(rope, "grid_indexing") or getattr(rope, "in_pixels", False):
            return None
        if hasattr(rope, "periods"):
            series = 2 * math.pi / rope.periods.double()
            by = {"separate": "axis", "min": "shorter", "max": "longer"}[rope.normalize_coords]
        elif hasattr(rope, "bands"):
            series, by = rope.bands.double(), None
        else:
            return None
        omega = torch.block_diag(series[:, None], series[:, None])
        order = "half" if getattr(rope, "rotate_half", hasattr(rope, "periods")) else "interleaved"
        return cls(omega.flip(-1) if rope.grid_indexing == "xy" else omega, order, by)

    def locate(self, rope: Any, *args: Any) -> Grid:
        shape = args[0] if args and args[0] is not None else rope.feat_shape
        grid = Grid(tuple(shape)).offset(rope.grid_offset)
        if self.settings is not None:
            return grid.cells(self.settings)
        return grid if rope.ref_feat_shape is None else grid.interpolate(rope.ref_feat_shape)

    def sample(self, rope: Any) -> tuple[Any, ...]:
        return ([2, 3] if getattr(rope, "feat_shape", None) is None else list(rope.feat_shape),)


class Pixels(Formula):
    """transformers' DINOv3: pixels (B, C, H, W); settings: the size of a patch."""

    @classmethod
    def read(cls, rope: Any) -> Formula | None:
        if not hasattr(rope, "num_patches_h") or not hasattr(rope, "inv_freq"):
            return None
        series, size = 2 * math.pi * rope.inv_freq.double(), rope.config.patch_size
        patch = (size, size) if isinstance(size, int) else tuple(size)
        return cls(torch.block_diag(series[:, None], series[:, None]), "half", patch)

    def locate(self, rope: Any, *args: Any) -> Grid:
        return Grid(tuple(n // p for n, p in zip(args[0].shape[-2:], self.settings, strict=True))).cells("axis")

    def sample(self, rope: Any) -> tuple[Any, ...]:
        return (torch.zeros(1, 1, 2 * self.settings[0], 3 * self.settings[1]),)


class Places(Formula):
    """transformers' vision towers: places of patches, (N, K) or (K, N), which settings says.

    Frequencies are read off the tables of single steps.
    """

    @classmethod
    def read(cls, rope: Any) -> Formula | None:
        code = getattr(find_method(type(rope), "forward"), "__code__", None)
        if code is None or code.co_varnames[1:3] != ("x", "position_ids") or not hasattr(rope, "inv_freq"):
            return None
        for num_axes, axes_first in ((2, False), (2, True), (3, False), (3, True)):
            steps = torch.cat([torch.zeros(2, num_axes), torch.eye(num_axes)]).long()  # (N, K)
            try:
                cos, sin = rope.forward(torch.zeros(1), steps.T if axes_first else steps)
            except (RuntimeError, IndexError, ValueError, TypeError):
                continue
            if cos.ndim == 2 and len(cos) == len(steps):
                angles = torch.atan2(sin.double(), cos.double())[2:].T
                half = angles[: len(angles) // 2]
                is_half = torch.equal(half, angles[len(half) :])
                return cls(half if is_half else angles[::2], "half" if is_half else "interleaved", axes_first)
        return None

    def locate(self, rope: Any, *args: Any) -> Coordinates:
        return Coordinates((args[1].T if self.settings else args[1]).float())

    def sample(self, rope: Any) -> tuple[Any, ...]:
        places = torch.arange(5)[:, None] + torch.arange(self.omega.shape[1])
        return torch.zeros(1), places.T if self.settings else places


_KINDS = (Ids, Video, TimmGrid, Pixels, Places)


@torch.no_grad()
def read_formula(path: str, module: nn.Module) -> Formula:
    """Return what a module's tables follow from.

    Raises:
        UnknownTablesError: the tables are others, or have no values yet.
    """
    twin = copy.deepcopy(module) if any(b.is_meta for b in module.buffers()) else copy.deepcopy(module).cpu().eval()
    with torch.device("cpu"):
        for kind in _KINDS:
            formula = kind.read(twin)
            if formula is not None and _agrees(formula, twin):
                return formula
    raise UnknownTablesError(
        f"{path}: expected a module whose tables are known, got {type(module).__name__}; language models scale by "
        "their configuration (rope_parameters), other modules by their own frequencies"
    )


def _agrees(formula: Formula, rope: Any) -> bool:
    args = formula.sample(rope)
    made = formula.split(getattr(rope, formula.method)(*args))
    angles = _angles(formula.locate(rope, *args), formula.omega, torch.device("cpu"))
    bound = max(_BOUND, 4 * torch.finfo(made[0].dtype).eps)
    pairs = zip(made, (angles.cos(), angles.sin()), strict=True)
    return all(t.shape[-1] == 2 * a.shape[-1] and (t - formula.lay(a, t)).abs().max() < bound for t, a in pairs)


def makes_tables(module: Any) -> bool:
    """Return whether a module looks like one that makes cos and sin."""
    name = type(module).__name__.lower()
    return "rope" in name or "rotary" in name or (hasattr(module, "axes_dim") and hasattr(module, "theta"))


# --- in a model ------------------------------------------------------------------------------------------------------


class StandIn(NamedTuple):
    """How a module's class is derived, see :class:`.copies.Recipe`."""

    method: str

    def derive(self, cls: type) -> Any:
        original = getattr(cls, self.method)

        @functools.wraps(original)
        def turned(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.formula.turn(self, original(self, *args, **kwargs), *args, *kwargs.values())

        return _derive(cls, self, original, turned)


_DERIVED: dict[tuple[type, str, Any], Any] = {}


def _derive(cls: type, recipe: StandIn, original: Any, method: Any) -> Any:
    key = (cls, recipe.method, original)
    if key not in _DERIVED:
        _DERIVED[key] = derive_class(cls, ((recipe.method, (method, None)),), recipe, ("rotation", "formula"))
    return _DERIVED[key]


def stand_in(modules: Mapping[str, Any], device: torch.device) -> dict[str, TableFrequencies]:
    """Let the tables of modules follow frequencies that can be scaled, and return these by the modules' names.

    Args:
        modules: by name.
        device: of the frequencies of a module without tensors.

    Raises:
        UnknownTablesError: the tables of one of them are not known; all stay as they were.
    """
    formulas = {path: read_formula(path, module) for path, module in modules.items()}
    made: dict[str, TableFrequencies] = {}
    for path, formula in formulas.items():
        module = modules[path]
        tensors = [*module.parameters(), *module.buffers()]
        made[path] = TableFrequencies(formula.omega, device=tensors[0].device if tensors else device)
        module.rotation, module.formula = made[path], formula
        module.__class__ = StandIn(formula.method).derive(type(module))
    return made
