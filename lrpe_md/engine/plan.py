"""How the kernels' work is cut: tiles, and the share of each program."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import triton

__all__ = ["TILES", "Plan", "Tile", "cut", "parts", "plan", "tile"]


class Plan(NamedTuple):
    """How the work is cut. Everything that a compiled kernel depends on is in the first six."""

    block_r: int  # rows (heads of samples) a tile, whose loads are in flight together
    block_n: int  # tokens a tile
    num_warps: int
    max_registers: int | None  # a thread: fewer leave room for more warps
    stages: int  # of the walk with dω: so many less one steps' rows are on their way
    rows_first: bool  # frequencies are read once a tile's rows are asked for
    token_programs: int  # T: each walks over every T-th block of tokens, and shares those left after full rounds
    per: int  # rows a program, for which its angles serve


class Tile(NamedTuple):
    rows: int
    elements: int  # of a row: tokens times channels
    num_warps: int
    max_registers: int | None = None
    stages: int = 1
    rows_first: bool = False


# Bytes an element, map and pass -> tiles up to 16, up to 64, more channels wide. A pass of two words that is not here
# has the tiles of the first.
# Chosen in tuning runs on an H200 among about 20 tiles each, by the worst of shared and per-head frequencies on the
# workloads of scripts/benchmark.py (14×14 and 64×64 grids with head_dim 64; 21×30×52 with 128): within 2% of the best
# found for each, within 4% with dω and an activation. Tiles up to 16 wide, mostly of blocks of channels: on 64×64 with
# head_dim 72 and 80 (rotate also 48 and 96), within 4% of the best with shared frequencies, 10% with dω by head.
# float64 is not tuned, nor partial rotation.
# Two rows of four tokens a tile rather than one of eight: cosine's forward the same on 64×64, 0.5% faster on 14×14, 4%
# with coordinates, 8% with silu.
# The compiler asks for rows late, after the frequencies have come, where their addresses take long to compute.
# rows_first holds it back: rotate 0.2 to 0.5% faster, and 1% where it reads coordinates or activates; cosine 1% with
# head_dim 72 and 128, but 0.3% slower with 64.
# With dω, stages let rows wait in shared memory rather than in registers, which an activation needs: cosine with silu
# 0.88 with three and 0.80 without, softplus 0.88 and 0.72 (64×64). Rotate in 16 bits, up to 64 wide, is as
# fast without stages.
_ONE, _FEW, _MANY, _16 = Tile(1, 512, 1), Tile(2, 256, 1), Tile(4, 256, 1), Tile(2, 512, 1)
_FEW_FIRST, _MANY_FIRST, _16_FIRST = (t._replace(rows_first=True) for t in (_FEW, _MANY, _16))
TILES = {
    (2, "cosine", "forward"): (_FEW_FIRST, _FEW, _FEW),
    (2, "cosine", "forward activated"): (_MANY_FIRST, _FEW, _16_FIRST),
    (2, "cosine", "backward"): (_FEW, _FEW, _16_FIRST),
    (2, "cosine", "dtheta"): (Tile(4, 512, 4, 128), Tile(2, 256, 1, 128, 2), Tile(2, 512, 2, 168, 3)),
    (2, "cosine", "dtheta activated"): (Tile(2, 512, 2, 168, 3), Tile(2, 512, 2, 168, 3), Tile(2, 512, 2, 168, 3)),
    (2, "rotate", "forward"): (_MANY_FIRST, _16_FIRST, _16_FIRST),
    (2, "rotate", "forward activated"): (
        _MANY_FIRST, Tile(4, 512, 1, rows_first=True), Tile(4, 2048, 4, rows_first=True)
    ),
    (2, "rotate", "backward"): (_MANY_FIRST, _16_FIRST, _16_FIRST),
    (2, "rotate", "dtheta"): (Tile(4, 512, 2, 168), Tile(2, 512, 1, 168), Tile(2, 512, 2, 168, 3)),
    (2, "rotate", "dtheta activated"): (Tile(2, 512, 1, 255, 3), Tile(2, 512, 1, 255, 3), Tile(1, 512, 1, 168, 3)),
    (4, "cosine", "forward"): (Tile(1, 256, 1), Tile(1, 256, 1), _ONE),
    (4, "cosine", "backward"): (Tile(2, 128, 1), Tile(2, 128, 1), Tile(2, 128, 1)),
    (4, "cosine", "dtheta"): (Tile(2, 256, 2, 128, 2), Tile(2, 256, 2, 128, 2), Tile(2, 256, 2, 128, 2)),
    (4, "rotate", "forward"): (_FEW, _FEW, _FEW),
    (4, "rotate", "backward"): (_ONE, _ONE, _FEW),
    (4, "rotate", "dtheta"): (Tile(2, 512, 2, 168, 2), Tile(2, 512, 2, 168, 2), Tile(2, 512, 2, 168, 2)),
}  # fmt: skip
_64 = Tile(1, 512, 4)
NUM_SM = 132  # of the largest GPUs; a fixed number, so that dω is summed in the same order on every GPU
REGISTERS = 65536  # an SM
# What a new block of tokens costs, in blocks of rows: the angles are half to one of them, and where programs share
# blocks they read less side by side. Measured on an H200: 2 makes cosine on 14×14 tokens with ω by head 1% slower
# (44 × 4 programs a head instead of 50 × 3), and the others differ by less than their medians do.
NEW_TOKENS = 8


def tile(map: str, direction: str, width: int, itemsize: int) -> Tile:
    """For tiles ``width`` channels wide. Sizes never choose another compiled kernel."""
    plain = direction.partition(" ")[0]
    if itemsize == 8:
        return _64._replace(max_registers=255) if plain == "dtheta" else _64
    tiles = TILES.get((itemsize, map, direction)) or TILES[itemsize, map, plain]
    return tiles[(width > 16) + (width > 64)]


def plan(
    map: str, direction: str, num_tokens: int, groups: int, rows: int, heads: int, width: int, itemsize: int,
    samples: int = 1, step: int = 1, interpreting: bool = False,
) -> Plan:  # fmt: skip
    """Cut the work.

    Args:
        direction: "forward", "backward", "dtheta" for a backward with the frequencies' or the phase's gradient; with an
            activation "forward activated" and so on.
        groups: of heads that share frequencies; for each of ``samples``, where they have coordinates of their own.
        rows: of a group, heads of samples; heads: of a group in one sample.
        step: what the number of programs along the tokens must be divisible by.
        interpreting: for Triton's interpreter.
    """
    block_r, elements, num_warps, max_registers, stages, rows_first = tile(map, direction, width, itemsize)
    block_n = max(1, elements // width)
    if interpreting:  # the cost is by program and row, not by size
        block_n = max(16, min(triton.next_power_of_2(num_tokens), 32768 // width))
        block_r = max(1, min(rows, 8 if max_registers is None else 2))
    token_blocks = triton.cdiv(num_tokens, block_n)
    if max_registers is None:
        token_programs, per = token_blocks, block_r
    elif interpreting:
        token_programs, per = step, max(1, rows)
    else:
        # As many programs as run at once: they walk far, since their partial sums are written and read once more.
        # Registers decide: tests/kernels/test_aot.py checks that shared memory leaves room.
        programs = NUM_SM * (REGISTERS // (32 * num_warps * max_registers))
        programs = max(1, programs // max(1, samples) // groups)
        token_programs, per = cut(token_blocks, rows, heads, block_r, programs, step)
    return Plan(block_r, block_n, num_warps, max_registers, stages, rows_first, token_programs, per)


@lru_cache(maxsize=4096)
def cut(token_blocks: int, rows: int, heads: int, block_r: int, programs: int, step: int) -> tuple[int, int]:
    """Programs along the tokens, and rows for each program, so that the longest walk is shortest.

    A program forms the angles of a block of tokens and goes through its rows, at every ``token_programs``-th block in
    as many rounds as are full, and through a share of the rows of the blocks that are left. All run at once, unless not
    even ``step`` of them may.
    """
    row_blocks = max(1, -(-rows // block_r))
    best, shortest = (step, row_blocks * block_r), math.inf
    wanted = 1
    while wanted <= programs:
        blocks = -(-row_blocks // wanted)
        number = math.prod(parts(rows, heads, blocks * block_r))
        token_programs = max(step, min(token_blocks, programs // max(1, number)) // step * step)
        rounds, left = divmod(token_blocks, token_programs)
        walk = rounds * (NEW_TOKENS + blocks) + (NEW_TOKENS + -(-left * blocks // token_programs) if left else 0)
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
