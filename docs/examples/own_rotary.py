"""Speed up your own rotary function with `drop_in`, or replace its tables with the call that `recognise` finds.

    python docs/examples/own_rotary.py --height 64 --width 64

The first two functions stand in for yours: one builds the tables, and the other rotates q and k with them.
"""

import argparse
import time

import torch
from torch import Tensor

from lrpe_md import rotate
from lrpe_md.integrations import drop_in, recognise


def make_tables(height: int, width: int, head_dim: int, base: float = 100.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin (N, head_dim): rows have the first half of the pairs, columns the second."""
    theta = base ** -(torch.arange(0, head_dim, 4, dtype=torch.float64) / head_dim)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = torch.cat([rows.reshape(-1, 1) * theta, columns.reshape(-1, 1) * theta], dim=-1).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k (B, H, N, D) with tables."""

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin

    return turn(q), turn(k)


def milliseconds(call) -> float:
    """Return the time of a call on the GPU."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 100


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=16, help="Height of the grid, in patches")
    parser.add_argument("--width", type=int, default=16, help="Width of the grid, in patches")
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args(argv)
    shape, head_dim = (args.height, args.width), args.head_dim
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cos, sin = (t.to(device) for t in make_tables(*shape, head_dim))
    q, k = torch.randn(2, 4, 8, args.height * args.width, head_dim, device=device)

    fast = drop_in(apply_rotary)  # the same arguments and results, from one kernel
    found = recognise(lambda x: apply_rotary(x, x, *make_tables(*shape, head_dim))[0], head_dim=head_dim, shape=shape)
    print("without tables:", found)
    arguments = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in found.arguments.items()}
    calls = {
        "apply_rotary": lambda: apply_rotary(q, k, cos, sin),
        "drop_in": lambda: fast(q, k, cos, sin),
        "rotate": lambda: rotate(q, k, **arguments),
    }
    expected, errors = calls["apply_rotary"](), {}
    for name, call in calls.items():
        errors[name] = max(float((a - b).abs().max()) for a, b in zip(call(), expected, strict=True))
        print(f"{name}: differs by at most {errors[name]:.1e}")
        if device == "cuda":  # on a CPU, the reference implementation runs, which is not faster
            print(f"{name}: {milliseconds(call):.3f} ms")
    return errors


if __name__ == "__main__":
    main()
