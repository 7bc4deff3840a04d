"""Random position augmentation, to train a model on varied offsets, sizes and resolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._ops import add_op_namespace_prefix, ops
from .coordinates import per_axis
from .grid import Coordinates, Grid

__all__ = ["AugmentPositions"]

Strength = float | Sequence[float]


class AugmentPositions(nn.Module):
    """Randomly transform positions in training mode, and leave them unchanged in eval mode.

    Call this once per step, so that all layers use the same positions. All samples of a batch share the random numbers.
    First, ``perturb`` moves each token separately, which turns a grid into a table. Then all tokens are shifted, each
    axis is stretched, and finally all axes are stretched by the same factor. The last three steps turn a grid into
    another grid. The new grid's scale and shift are tensors, so nothing is recompiled. ``torch.compile`` can trace the
    random numbers, but a CUDA graph cannot capture them, so call this module outside of graphs.

    Args:
        shift: maximum shift s, in units of position. Each axis is shifted by U(-s, s). Pass one number, or one per
            axis.
        jitter: maximum factor J ≥ 1. Each axis is multiplied by exp U(-ln J, ln J). Pass one number, or one per axis.
        rescale: maximum factor R ≥ 1. All axes are multiplied by the same factor, exp U(-ln R, ln R).
        perturb: strength σ, in steps of the grid, or in units of position for coordinates. Each token is moved along
            each axis by N(0, (σ/2)²), but by at most half a step. Pass one number, or one per axis; 0 leaves an axis
            unchanged.
        seed: random seed of a generator on the CPU. Use the same seed on ranks that share a sequence.

    Unrotated tokens stay unrotated. Call the module with :class:`Coordinates`, or with a :class:`Grid` and the device
    for the grid's scale and shift.

    Sources: shift, jitter and rescale come from DINOv3 (arXiv 2508.10104), which trains with ``rescale=2``. perturb
    comes from ComRoPE (arXiv 2506.03737).
    """

    def __init__(
        self,
        *,
        shift: Strength | None = None,
        jitter: Strength | None = None,
        rescale: float | None = None,
        perturb: Strength | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, least in (("shift", 0), ("jitter", 1), ("rescale", 1), ("perturb", 0)):
            strength: Any = {"shift": shift, "jitter": jitter, "rescale": rescale, "perturb": perturb}[name]
            numbers = [strength] if not isinstance(strength, Sequence) else strength
            if strength is not None and not all(least <= number < math.inf for number in numbers):
                raise ValueError(f"{name}: expected each number to be at least {least}, got {strength}")
        self.shift, self.jitter, self.rescale, self.perturb = shift, jitter, rescale, perturb
        self.state = torch.Generator("cpu").manual_seed(seed).get_state()

    def forward(self, positions: Grid | Coordinates, device: torch.device | str = "cpu") -> Grid | Coordinates:
        if not self.training:
            return positions
        num_axes = positions.num_axes
        scale = torch.ones(num_axes, dtype=torch.float64, device="cpu")
        shift = torch.zeros_like(scale)
        if self.shift is not None:
            shift = shift + self._uniform("shift", num_axes)
        for name in ("jitter", "rescale"):
            if getattr(self, name) is not None:
                factor = self._uniform(name, num_axes if name == "jitter" else 1).exp()
                scale, shift = scale * factor, shift * factor
        if self.perturb is not None:
            positions = self._perturbed(positions, device)
        return positions.transform(scale.to(device), shift.to(device))

    def _strength(self, name: str, num: int) -> Tensor:
        return torch.as_tensor(per_axis(name, getattr(self, name), num), dtype=torch.float64, device="cpu")

    def _uniform(self, name: str, num: int) -> Tensor:
        """Draw ``num`` values from U(-a, a), where a is the strength, or log(strength) if the strength is a factor."""
        strength = self._strength(name, num)
        bound = strength if name == "shift" else strength.log()
        return (2 * ops.draw(self.state, [num], False) - 1) * bound

    def _perturbed(self, positions: Grid | Coordinates, device: torch.device | str) -> Coordinates:
        if isinstance(positions, Coordinates):
            return self._moved(positions, torch.ones((), dtype=torch.float64, device="cpu"))
        grid = replace(positions, start=0, length=None)  # perturb a shard exactly like the whole sequence
        affine = grid.affine(torch.device(device))
        step = torch.ones((), device="cpu") if affine is None else affine[:, 0]
        moved = self._moved(grid.explicit(device), step)
        return moved if positions.whole else moved.shard(positions.start, positions.length)

    def _moved(self, table: Coordinates, step: Tensor) -> Coordinates:
        strength = self._strength("perturb", table.num_axes)
        size, device = table.coords.shape, table.coords.device
        noise = ops.draw(self.state, list(size), True) * strength / 2
        return replace(table, coords=table.coords + noise.clamp(-0.5, 0.5).to(device) * step.to(device))

    def extra_repr(self) -> str:
        strengths = {name: getattr(self, name) for name in ("shift", "jitter", "rescale", "perturb")}
        return ", ".join(f"{name}={value}" for name, value in strengths.items() if value is not None)


# --- random numbers as an operator, because compilers reject generators -----------------------------------------------


def _draw_random(state: Tensor, size: Sequence[int], normal: bool) -> Tensor:
    """Draw float64 values from U(0, 1) or N(0, 1) with a CPU generator, and update the generator's state in place."""
    generator = torch.Generator("cpu")
    generator.set_state(state)
    drawn = (torch.randn if normal else torch.rand)(size, dtype=torch.float64, generator=generator, device="cpu")
    state.copy_(generator.get_state())
    return drawn


def _draw_fake(state: Tensor, size: Sequence[int], normal: bool) -> Tensor:
    return state.new_empty(size, dtype=torch.float64)


_lib = torch.library.Library(ops.name, "FRAGMENT")
_lib.define("draw(Tensor(a!) state, SymInt[] size, bool normal) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_lib.impl("draw", _draw_random, "CPU")
torch.library.register_fake(add_op_namespace_prefix("draw"), _draw_fake, lib=_lib)
