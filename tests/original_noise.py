"""Print the table of docs/schemes.md with the rounding errors of the presets' original code.

PYTHONPATH=tests python tests/original_noise.py        # all rows
PYTHONPATH=tests python tests/original_noise.py NAME   # the rows of some presets
"""

from __future__ import annotations

import sys

import torch
from float64 import Float64
from original_presets import CASES, HEADS, encode, inputs, is_golden, sized

from lrpe_md.presets.registry import SCHEMES


def differences(name: str) -> tuple[float, float, float]:
    """Return the errors of the original code in float32, and of lrpe-md in float32 and float64.

    Each is the largest difference from the original code in float64, for normally distributed q and k of three sizes.
    """
    found = []
    case = next(c for c in CASES if c.name == name)
    for number in range(3):
        p, segments = case.preset, sized(case, number)
        positions = p.positions(*segments, **case.options)
        q, k = inputs(positions.num_tokens, p.head_dim, max(HEADS, p.num_heads))
        weights = p.omega if case.omega is None else case.omega(p).permute(1, 2, 0)
        phase = None if case.phase is None else case.phase(p)
        with torch.no_grad():
            single = case.code(q, k, p, segments, case.options)
            with Float64():
                double = case.code(q.double(), k.double(), p, segments, case.options)
                exact_weights = p.omega if case.omega is None else case.omega(p).permute(1, 2, 0)
                exact_phase = None if case.phase is None else case.phase(p)
            ours = encode(p, q, k, positions, omega=weights, phase=phase)
            exact = encode(p, q.double(), k.double(), positions, omega=exact_weights, phase=exact_phase)
        found.append([largest_difference(values, double) for values in (single, ours, exact)])
    original, single, double = (max(column) for column in zip(*found, strict=True))
    return original, single, double


def largest_difference(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def measured_presets() -> list[str]:
    """Return the presets of the table, whose original code is in a package."""
    # The parameter of rope_vit_mixed is drawn again in float64. All others are computed in float64.
    return [
        name for name in SCHEMES
        if name != "rope_vit_mixed" and not is_golden(next(c for c in CASES if c.name == name))
    ]  # fmt: skip


def main(names: list[str]) -> None:
    known = measured_presets()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"NAME: expected presets of this table, {known}, got {unknown}")
    print("| preset | original in float32 | ours in float32 | ours in float64 |\n| --- | --- | --- | --- |")
    for name in names or known:
        print(f"| `{name}` | " + " | ".join(f"{value:.0e}" for value in differences(name)) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
