"""Tune the tiles of linear attention for ``scripts.bench tune``. There is one tile for each pass and state size.

A tile is timed in a complete forward or backward pass. The other kernels of the pass use their tiles from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lrpe_md import linear_attention
from lrpe_md.engine.core.operator import call_cache
from lrpe_md.engine.linear import plan as linear_plan
from lrpe_md.engine.linear.plan import (
    CAUSAL_PASSES,
    DECAYING,
    NORMALIZED,
    NORMALIZERS,
    SEPARATE,
    SEPARATE_STATE,
    TILES,
    LinearPass,
    LinearTile,
)

from ..common.cases import LinearCase
from .linear_measure import WORKLOADS, Inputs, make_inputs, make_pass

# A map and a head_dim whose states have this many elements, for each key of the rows of TILES.
MAPS: dict[int, tuple[Any, int]] = {
    2048: ("cosine", 32), 4096: ("rotate", 64), 8192: ("cosine", 64), 11520: ("cosine", 72), 12288: ("rotate", 96),
    12800: ("cosine", 80), 16384: ("rotate", 128), 18432: ("cosine", 72), 20480: ("cosine", 80), 24576: ("cosine", 96),
    32768: ("cosine", 128),
}  # fmt: skip
FORWARDS = (
    LinearPass.FORWARD, LinearPass.STATE, LinearPass.OUTPUT, LinearPass.CAUSAL, LinearPass.CAUSAL_NORMALIZED,
    LinearPass.CAUSAL_DECAY,
)  # fmt: skip
NORMALIZING = (*NORMALIZED.values(), *SEPARATE.values(), *NORMALIZERS)
ONE_PASS = (LinearPass.FORWARD, LinearPass.BACKWARD)
REGISTERS = (None, 128, 160, 168, 232)


class LinearPlace(NamedTuple):
    """Table entry that holds one tile."""

    stage: LinearPass
    width: int  # key in the row: the number of elements of the largest state

    @property
    def row(self) -> str:
        return f"linear {self.stage.value}"

    @property
    def name(self) -> str:
        return f"up to {self.width:,}"

    def __str__(self) -> str:
        return f"{self.row}, states {self.name}"

    @property
    def tile(self) -> LinearTile:
        return TILES[self.stage][self.width]

    def cases(self, small: bool = False) -> dict[str, LinearCase]:
        """Return the problems to time, by name. With ``small``, return faster problems that use the same kernels."""
        chosen, head_dim = MAPS[self.width]
        if self.stage in ONE_PASS:
            names = ("windows" if head_dim == 32 else "vit224",)
        elif self.stage in CAUSAL_PASSES:
            has_decay = self.stage in DECAYING.values()
            names = ("causal-relu" if self.stage in NORMALIZING else "causal-decay" if has_decay else "causal",)
        elif self.stage is LinearPass.DELTA_KEYS:
            names = ("frames-delta",)
        else:
            names = ("img64", "video64")
        # For large states, an unrotated normaliser uses the tiles of SEPARATE.
        is_encoded = self.stage in NORMALIZED.values() and self.width > SEPARATE_STATE
        found = {}
        for name in names:
            case = replace(WORKLOADS[name], normalizer="encoded") if is_encoded else WORKLOADS[name]
            heads = case.heads[0] * case.head_dim // head_dim
            case = replace(case, map=chosen, head_dim=head_dim, heads=(heads, heads), pairs="half")
            found[name] = self.shrink(case) if small else case
        return found

    def shrink(self, case: LinearCase) -> LinearCase:
        """Reduce a case to a few tokens, but keep enough of them for two passes if the case needs two."""
        shape = {1: (2048,), 2: (2, 2) if self.stage in ONE_PASS else (40, 40), 3: (3, 20, 40)}[len(case.shape)]
        block = shape[1] * shape[2] if case.block else 0
        return replace(case, batch=1, heads=(1, 1), shape=shape, block=block)

    def shapes(self) -> list[LinearTile]:
        """Return candidates that vary tokens, warps and stages, with the register limit of the table's tile."""
        return [
            LinearTile(block_n, num_warps, stages, self.tile.max_registers)
            for block_n in (16, 32, 64)
            for num_warps in ((2, 4) if self.width == 2048 else (4, 8))
            for stages in (1, 2, 3, 4)
        ]

    def refinements(self, tile: LinearTile) -> list[LinearTile]:
        """Return candidates with the same shape but other register limits."""
        return [tile._replace(max_registers=most) for most in REGISTERS if most != tile.max_registers]

    @contextmanager
    def in_table(self, tile: LinearTile) -> Iterator[None]:
        """Put a tile into the table. If the tile does not fit the GPU, calls fail instead of using a smaller one."""
        kept, shrink = TILES[self.stage], linear_plan.shrink
        try:
            TILES[self.stage] = {**kept, self.width: tile}
            linear_plan.shrink = refuse
            call_cache.clear()
            yield
        finally:
            TILES[self.stage], linear_plan.shrink = kept, shrink
            call_cache.clear()

    def passes(self, inputs: Sequence[Inputs], impl: Any = "triton") -> list[Callable[[], Any]]:
        def attend(given: Inputs, q: Any, k: Any, v: Any, omega: Any) -> Any:
            where = {"omega": omega, "positions": given.positions}
            return linear_attention(q, k, v, map=given.case.map, impl=impl, **where, **given.options)

        backward = "backward_omega" if self.stage is LinearPass.QUERIES_OMEGA else "backward"
        which = "forward" if self.stage in FORWARDS else backward
        return [make_pass(which, attend, each) for each in inputs]

    def inputs(self, case: LinearCase, device: torch.device) -> Inputs:
        return make_inputs(case, device)


class TooLarge(Exception):
    """Raised for a tile that needs more shared memory than the GPU has."""


def refuse(tile: LinearTile) -> list[LinearTile]:
    raise TooLarge(f"{tile} needs more shared memory than the GPU has")


def choose_places() -> list[LinearPlace]:
    return [LinearPlace(stage, width) for stage, row in TILES.items() for width in row]


def write_table(tiles: dict[LinearPass, dict[int, LinearTile]], write_tile: Callable[[Any], str]) -> str:
    lines = ["TILES: dict[LinearPass, dict[int, LinearTile]] = {"]
    for stage, row in tiles.items():
        entries = [f"{width}: {write_tile(tile)}" for width, tile in row.items()]
        line = f"    {stage}: {{{', '.join(entries)}}},"
        if len(line) > 120:
            line = "\n        ".join([f"    {stage}: {{", *(f"{entry}," for entry in entries)]) + "\n    },"
        lines.append(line)
    return "\n".join([*lines, "}  # fmt: skip"])
