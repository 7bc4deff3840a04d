"""Calls with ``out=`` for the tests in the interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrpe_md import Coordinates, Grid, Norm, cosine, rotate

# Each form has the map and its options, sizes, positions, and destinations of the outputs.
FORMS: dict[str, dict[str, Any]] = {
    "decode": {"tokens": 1, "heads": (8, 2), "out": (None, "cache")},
    "prefill": {"tokens": 5, "heads": (4, 2), "out": (None, "cache")},
    "both": {"tokens": 3, "heads": (4, 2), "out": ("cache", "cache")},
    "one tensor": {"tokens": 3, "heads": (2,), "out": ("cache",)},
    "partial, half": {"tokens": 3, "heads": (4, 2), "options": {"rotary_dim": 8}, "out": (None, "cache")},
    "partial, slice": {
        "tokens": 3, "heads": (4, 2), "options": {"rotary_dim": slice(4, 12), "pairs": "interleaved"},
        "out": ("cache", None),
    },
    "partial, one": {"tokens": 2, "heads": (2,), "options": {"rotary_dim": 8}, "out": ("cache",)},
    "tokens first": {"tokens": 3, "heads": (4, 2), "layout": "bnhd", "out": (None, "cache")},
    "head_dim 20": {"tokens": 3, "heads": (4, 2), "head_dim": 20, "out": ("cache", "cache")},
    "odd strides": {"tokens": 3, "heads": (4, 2), "layout": "odd", "out": ("cache", "cache")},
    "other lengths": {"tokens": (2, 5), "heads": (4, 2), "out": ("cache", "cache")},
    "own positions": {"tokens": 3, "heads": (4, 2), "where": "by sample", "out": (None, "cache")},
    "table": {"tokens": 3, "heads": (4, 2), "where": "table", "out": (None, "cache")},
    "cosine": {"map": "cosine", "tokens": 3, "heads": (4, 2), "out": (None, "cache")},
    "cosine, part": {
        "map": "cosine", "tokens": 3, "heads": (4, 2), "options": {"rotary_dim": 8}, "out": (None, "cache"),
    },
    "norm": {"tokens": 3, "heads": (4, 2), "options": {"norm": "head"}, "out": (None, "cache")},
    "norm of heads": {"tokens": 3, "heads": (4, 2), "options": {"norm": "heads"}, "out": ("cache", "cache")},
    "act, amplitude": {
        "tokens": 3, "heads": (4, 2), "options": {"act": "silu", "amplitude": 1.5}, "out": ("cache", "cache"),
    },
    "phases": {"map": "cosine", "tokens": 3, "heads": (2, 2), "options": {"phase": 2}, "out": (None, "cache")},
    "inverse": {"tokens": 3, "heads": (2,), "options": {"inverse": True}, "out": ("cache",)},
}  # fmt: skip
COPIED = ("cosine, part", "norm of heads", "phases")  # no launch can write these in place
LENGTH, BATCH = 9, 2


class Job:
    """A call, its expected results, and their destinations."""

    def __init__(self, form: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        chosen = FORMS[form]
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(size, generator=generator).to(device, dtype)

        self.head_dim, heads = chosen.get("head_dim", 16), chosen["heads"]
        tokens = chosen["tokens"]
        self.tokens = tokens if isinstance(tokens, tuple) else (tokens,) * len(heads)
        self.layout = chosen.get("layout", "bhnd")
        self.xs = tuple(self._laid(draw(BATCH, h, n, self.head_dim)) for h, n in zip(heads, self.tokens, strict=True))
        self.function = cosine if chosen.get("map") == "cosine" else rotate
        self.options: dict[str, Any] = dict(chosen.get("options", {}))
        part = self.options.get("rotary_dim", self.head_dim)
        width = part.stop - part.start if isinstance(part, slice) else part
        channels = width if self.function is cosine else width // 2
        self.options["omega"] = draw(1, channels, 1, dtype=torch.float32)
        if "norm" in self.options:
            self.options["norm"] = Norm(over=self.options["norm"])
        if "phase" in self.options:
            self.options["phase"] = draw(self.options["phase"], 1, channels, dtype=torch.float32)
        where = tuple(self._place(chosen.get("where", "grid"), n, device) for n in self.tokens)
        self.options["positions"] = where if len(set(self.tokens)) > 1 else where[0]
        self.wanted = self.run("reference")
        self.placed = tuple(kind is not None for kind in chosen["out"])

    def _laid(self, x: Tensor) -> Tensor:
        """Copy x into the memory layout of the form."""
        if self.layout == "bnhd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.layout == "odd":
            wide = x.new_empty((*x.shape[:3], x.shape[3] + 3))
            wide[..., 1 : 1 + x.shape[3]] = x
            return wide[..., 1 : 1 + x.shape[3]]
        return x

    @staticmethod
    def _place(kind: str, tokens: int, device: str) -> Any:
        if kind == "grid":
            return Grid((tokens,))
        if kind == "by sample":
            return Grid((tokens,), origin=torch.tensor([[3], [40]], device=device))
        return Coordinates(torch.arange(tokens * BATCH, device=device).view(BATCH, tokens, 1) * 7)

    def run(self, impl: str, **changes: Any) -> tuple[Tensor, ...]:
        found = self.function(*self.xs, **self.options, impl=impl, **changes)
        return found if len(self.xs) == 2 else (found,)

    def caches(self) -> list[Tensor | None]:
        """Return a cache of NaN for each output, or None for a new tensor."""
        found: list[Tensor | None] = []
        for y, placed in zip(self.wanted, self.placed, strict=True):
            cache = self._laid(torch.full((BATCH, y.shape[1], LENGTH, y.shape[3]), torch.nan).to(y))
            found.append(cache if placed else None)
        return found

    def out(self, caches: list[Any]) -> Any:
        return caches[0] if len(caches) == 1 else tuple(caches)

    def check(self, found: tuple[Tensor, ...], caches: list[Any], starts: list[int], **bounds: float) -> None:
        """Check that the results are in place and the rest of the caches is untouched."""
        for y, wanted, cache in zip(found, self.wanted, caches, strict=True):
            if cache is None:
                torch.testing.assert_close(y, wanted, **bounds)
                continue
            for sample, start in enumerate(starts):
                stop = start + wanted.shape[2]
                inside = slice(max(start, 0), max(0, min(stop, LENGTH)))
                part = slice(inside.start - start, max(inside.stop - start, inside.start - start))
                torch.testing.assert_close(cache[sample, :, inside], wanted[sample, :, part], **bounds)
                assert cache[sample, :, : inside.start].isnan().all()
                assert cache[sample, :, max(inside.stop, inside.start) :].isnan().all()
