"""Layer sizes that the benchmarks time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..common.cases import Case

__all__ = ["TEXT_WORKLOADS", "WORKLOADS", "Workload"]


@dataclass(frozen=True)
class Workload:
    """Sizes of a layer to time."""

    batch: int
    heads: int
    shape: tuple[int, ...]
    prefix: int
    head_dim: int
    key_heads: int | None = None  # for GQA, where q and k come from separate projections

    @property
    def num_tokens(self) -> int:
        return self.prefix + torch.Size(self.shape).numel()

    def case(self, map: Literal["cosine", "rotate"], *, per_head: bool = False, **changes: Any) -> Case:
        """Return a case for the layer: one tensor for cosine, or q and k as slices of one projection for rotate."""
        two = map == "rotate"
        heads = (self.heads, self.key_heads or self.heads) if two else (self.heads,)
        case = Case(
            map, self.shape, self.prefix, batch=self.batch, heads=heads, omega_heads=heads[-1] if per_head else 1,
            head_dim=self.head_dim, dtype=torch.bfloat16,
            layout=("bnhd" if self.key_heads else "packed") if two else "bhnd", grad_layout="bnhd" if two else "bhnd",
        )  # fmt: skip
        return replace(case, **changes)


WORKLOADS = {
    "vit224": Workload(256, 12, (14, 14), 1, 64),
    "img64": Workload(16, 16, (64, 64), 0, 64),
    "video": Workload(2, 24, (21, 30, 52), 512, 128),
}
TEXT_WORKLOADS = {"text": Workload(8, 32, (8192,), 0, 128, key_heads=8)}
