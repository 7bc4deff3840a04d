"""How the kernels' work is cut: tiles, and the share of each program."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import triton

__all__ = ["TILES", "Plan", "cut", "parts", "plan", "tile"]


class Plan(NamedTuple):
    """How the work is cut. Everything that a compiled kernel depends on is in the first four."""

    block_r: int  # rows (heads of samples) a tile, whose loads are in flight together
    block_n: int  # tokens a tile
    num_warps: int
    max_registers: int | None  # a thread: fewer leave room for more warps
    token_programs: int  # T: each walks over every T-th block of tokens
    per: int  # rows a program, for which its angles serve


# Bytes an element, map and pass -> rows, elements a row, warps and registers a tile: 8, up to 64, more channels wide. A
# pass of two words that is not here has the tiles of the first.
# Chosen in tuning runs on an H200 among about 20 tiles each, by the worst of shared and per-head frequencies on the
# workloads of scripts/benchmark.py (14×14 and 64×64 grids with head_dim 64; 21×30×52 with 128): within 2% of the best
# found for each, within 3% with dω. Tiles 8 wide: on 64×64 with head_dim 72 and 80, within 7% with dω. float64 is not
# tuned. A forward that reads coordinates, like one with an activation, wants more on its way: 0.91 of the copy's speed
# with two rows a tile, 0.86 with one (64×64).
# With dω and an activation the compiler decides: where registers run out it asks for some rows late. Cosine with silu
# 0.83 with these and 0.75 with the plain ones (64×64), but relu 0.72 and 0.89, softplus 0.73 and 0.80, softmax 0.67 and
# 0.71; rotate with silu 0.81 and 0.72, softplus 0.72 and 0.65, relu 0.85 and 0.89, softmax 0.72 and 0.74.
_16 = (2, 512, 1, None)
_ONE, _FEW, _MANY = (1, 512, 1, None), (2, 256, 1, None), (4, 256, 1, None)
TILES = {
    (2, "cosine", "forward"): (_FEW, _ONE, _16),
    (2, "cosine", "forward coordinates"): (_FEW, _FEW, _16),
    (2, "cosine", "forward activated"): (_MANY, _MANY, _16),
    (2, "cosine", "backward"): (_FEW, _FEW, _16),
    (2, "cosine", "dtheta"): ((4, 512, 4, 128), (2, 512, 2, 128), (2, 512, 2, 168)),
    (2, "cosine", "dtheta silu"): ((2, 512, 2, 168), (2, 512, 2, 168), (2, 512, 2, 168)),
    (2, "rotate", "forward"): (_MANY, _16, _16),
    (2, "rotate", "forward activated"): (_MANY, (4, 512, 1, None), (4, 2048, 4, None)),
    (2, "rotate", "backward"): (_MANY, _16, _16),
    (2, "rotate", "dtheta"): ((2, 1024, 4, 128), (2, 512, 1, 168), (2, 1024, 2, 168)),
    (2, "rotate", "dtheta silu"): ((4, 512, 2, 128), (4, 512, 2, 128), (4, 512, 2, 128)),
    (2, "rotate", "dtheta softplus"): ((4, 512, 2, 128), (4, 512, 2, 128), (4, 512, 2, 128)),
    (4, "cosine", "forward"): ((1, 256, 1, None), (1, 256, 1, None), (1, 512, 1, None)),
    (4, "cosine", "backward"): ((2, 128, 1, None), (2, 128, 1, None), (2, 128, 1, None)),
    (4, "cosine", "dtheta"): ((2, 512, 4, 96), (2, 512, 4, 96), (2, 512, 4, 96)),
    (4, "rotate", "forward"): (_FEW, _FEW, _FEW),
    (4, "rotate", "backward"): ((1, 512, 1, None), (1, 512, 1, None), _FEW),
    (4, "rotate", "dtheta"): ((2, 1024, 2, 255), (2, 1024, 2, 255), (2, 512, 2, 168)),
}
_64 = (1, 512, 4, None)
NUM_SM = 132  # of the largest GPUs; a fixed number, so that dω is summed in the same order on every GPU
REGISTERS = 65536  # an SM
# What a new block of tokens costs, in blocks of rows: the angles are half to one of them, but the rows must come, too.
# Measured on an H200: cosine on 14×14 tokens with ω by head took 89 µs with 25 × 2 programs a head, and 91 with 13 × 5,
# which 1 would choose; rotate on 8,192 tokens in one axis 0.82 of the copy's speed with 512 × 1, 0.95 with 264 × 3.
NEW_TOKENS = 8


def tile(map: str, direction: str, width: int, itemsize: int) -> tuple[int, int, int, int | None]:
    """Rows, tokens, warps and registers a tile, ``width`` channels wide. Sizes never choose another compiled kernel."""
    plain = direction.partition(" ")[0]
    if itemsize == 8:
        rows, elements, num_warps, max_registers = (*_64[:3], 255) if plain == "dtheta" else _64
    else:
        tiles = TILES.get((itemsize, map, direction)) or TILES[itemsize, map, plain]
        rows, elements, num_warps, max_registers = tiles[(width > 8) + (width > 64)]
    return rows, max(1, elements // width), num_warps, max_registers


def plan(
    map: str, direction: str, num_tokens: int, groups: int, rows: int, heads: int, width: int, itemsize: int,
    samples: int = 1, step: int = 1, interpreting: bool = False,
) -> Plan:  # fmt: skip
    """Cut the work.

    Args:
        direction: "forward", "forward coordinates" where that reads positions instead of a grid's, "forward activated";
            "backward"; "dtheta" for a backward with the frequencies' or the phase's gradient, with an activation
            "dtheta silu" or another's name.
        groups: of heads that share frequencies; for each of ``samples``, where they have coordinates of their own.
        rows: of a group, heads of samples; heads: of a group in one sample.
        step: what the number of programs along the tokens must be divisible by.
        interpreting: for Triton's interpreter.
    """
    block_r, block_n, num_warps, max_registers = tile(map, direction, width, itemsize)
    if interpreting:  # the cost is by program and row, not by size
        block_n = max(16, min(triton.next_power_of_2(num_tokens), 32768 // width))
        block_r = max(1, min(rows, 8 if max_registers is None else 2))
    if max_registers is None:
        return Plan(block_r, block_n, num_warps, None, triton.cdiv(num_tokens, block_n), block_r)
    if interpreting:
        return Plan(block_r, block_n, num_warps, max_registers, step, max(1, rows))
    # As many programs as run at once: they walk far, since their partial sums are written and read once more.
    programs = NUM_SM * (REGISTERS // (32 * num_warps * max_registers))
    programs = max(1, programs // max(1, samples) // groups)
    token_programs, per = cut(triton.cdiv(num_tokens, block_n), rows, heads, block_r, programs, step)
    return Plan(block_r, block_n, num_warps, max_registers, token_programs, per)


@lru_cache(maxsize=4096)
def cut(token_blocks: int, rows: int, heads: int, block_r: int, programs: int, step: int) -> tuple[int, int]:
    """Programs along the tokens, and rows for each program, so that the longest walk is shortest.

    A program walks over its share of the tokens' blocks, and at each forms the angles, waits for the first rows, and
    goes through its rows. All run at once, unless not even ``step`` of them may.
    """
    row_blocks = max(1, -(-rows // block_r))
    best, shortest = (step, row_blocks * block_r), math.inf
    wanted = 1
    while wanted <= programs:
        blocks = -(-row_blocks // wanted)
        number = math.prod(parts(rows, heads, blocks * block_r))
        token_programs = max(step, min(token_blocks, programs // max(1, number)) // step * step)
        walk = -(-token_blocks // token_programs) * (NEW_TOKENS + blocks)
        if token_programs * number <= programs and walk < shortest:
            best, shortest = (token_programs, blocks * block_r), walk
        if blocks == 1:
            break
        wanted = -(-row_blocks // (blocks - 1))  # the fewest that leave each a block less
    return best


def parts(rows: int, heads: int, per: int) -> tuple[int, int]:
    """Programs for ``per`` rows each in a sample, and samples or runs of them; some can be left without rows."""
    in_sample, all_parts = -(-heads // per), -(-rows // per)
    return in_sample, -(-all_parts // max(1, in_sample))
