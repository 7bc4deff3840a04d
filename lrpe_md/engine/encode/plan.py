"""Divide the work of encoding kernels into tiles and programs."""

from __future__ import annotations

import math
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import triton


class Pass(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    DOMEGA = "domega"  # a backward pass that computes gradients of frequencies, phase or weights


class Work(NamedTuple):
    """Amount of work to divide."""

    map: str
    stage: Pass
    activated: bool
    num_tokens: int
    groups: int  # groups of heads that share frequencies
    rows: int  # rows of a group (heads of samples)
    heads: int  # rows of a group in one sample
    width: int  # channels of a row that a tile holds
    itemsize: int
    samples: int = 1  # samples with their own coordinates; 1 if all share them
    step: int = 1  # the number of programs along the tokens must be a multiple of this
    interpreting: bool = False  # for Triton's interpreter
    rows_per_weight: int = 0  # if nonzero: number of adjacent rows that share weights, as the rows of a program must
    tables: str = "none"  # Variant.tables


class Plan(NamedTuple):
    """Division of the work among programs. A compiled kernel depends only on the first six fields."""

    block_r: int  # number of rows (heads of samples) that are loaded together in a step
    block_n: int  # tokens of a tile
    num_warps: int
    max_registers: int | None  # per thread; fewer registers leave room for more warps
    stages: int  # in the walk with dω, the rows of stages - 1 steps are loaded ahead
    rows_first: bool  # start loading rows before frequencies
    token_programs: int  # T: each program walks over every T-th block of tokens; the last, partial round is shared
    rows_per_program: int  # rows of a program, all with the same angles


class Tile(NamedTuple):
    rows: int
    elements: int  # per row: tokens times channels
    num_warps: int
    max_registers: int | None = None
    stages: int = 1
    rows_first: bool = False


# (itemsize, map, pass, kind) -> tiles for rows of up to 16, up to 64, and more channels. The kind is "tables" if the
# caller passes cos and sin, "activated" with an activation, or else "plain". A pass without an entry for its kind uses
# "plain". docs/tuning.md explains how the tiles were chosen; scripts/bench/tune.py tunes them for another GPU. float64
# and partial rotation are not tuned.
_ONE, _FEW, _MANY, _16 = Tile(1, 512, 1), Tile(2, 256, 1), Tile(4, 256, 1), Tile(2, 512, 1)
_FEW_FIRST, _MANY_FIRST, _16_FIRST = (t._replace(rows_first=True) for t in (_FEW, _MANY, _16))
TILES = {
    (2, "cosine", Pass.FORWARD, "plain"): (_FEW_FIRST, _FEW, _FEW),
    (2, "cosine", Pass.FORWARD, "activated"): (_MANY_FIRST, _FEW, _16_FIRST),
    (2, "cosine", Pass.BACKWARD, "plain"): (_FEW, _FEW, _16_FIRST),
    (2, "cosine", Pass.DOMEGA, "plain"): (Tile(4, 512, 4, 128), Tile(2, 256, 1, 128, 2), Tile(2, 512, 2, 168, 3)),
    (2, "cosine", Pass.DOMEGA, "activated"): (
        Tile(2, 512, 2, 168, 3), Tile(2, 512, 2, 168, 3), Tile(2, 512, 2, 168, 3)
    ),
    (2, "rotate", Pass.FORWARD, "plain"): (_MANY_FIRST, _16_FIRST, _16_FIRST),
    (2, "rotate", Pass.FORWARD, "activated"): (
        _MANY_FIRST, Tile(4, 512, 1, rows_first=True), Tile(4, 2048, 4, rows_first=True)
    ),
    (2, "rotate", Pass.BACKWARD, "plain"): (_MANY_FIRST, _16_FIRST, _16_FIRST),
    (2, "rotate", Pass.DOMEGA, "plain"): (Tile(4, 512, 2, 168), Tile(2, 1024, 4, 168, 3), Tile(2, 1024, 4, 168, 3)),
    (2, "rotate", Pass.DOMEGA, "activated"): (
        Tile(2, 512, 1, 255, 3), Tile(2, 512, 1, 255, 3), Tile(1, 512, 1, 168, 3)
    ),
    (2, "cosine", Pass.FORWARD, "tables"): (_MANY, _MANY, _MANY),
    (2, "cosine", Pass.BACKWARD, "tables"): (_MANY, _MANY, _MANY),
    (2, "rotate", Pass.FORWARD, "tables"): (_MANY, Tile(4, 512, 1), Tile(4, 512, 1)),
    (2, "rotate", Pass.BACKWARD, "tables"): (_MANY, Tile(4, 512, 1), Tile(4, 512, 1)),
    (4, "cosine", Pass.FORWARD, "plain"): (Tile(1, 256, 1), Tile(1, 256, 1), _ONE),
    (4, "cosine", Pass.BACKWARD, "plain"): (Tile(2, 128, 1), Tile(2, 128, 1), Tile(2, 128, 1)),
    (4, "cosine", Pass.DOMEGA, "plain"): (Tile(2, 256, 2, 128, 2), Tile(2, 256, 2, 128, 2), Tile(2, 256, 2, 128, 2)),
    (4, "rotate", Pass.FORWARD, "plain"): (_FEW, _FEW, _FEW),
    (4, "rotate", Pass.BACKWARD, "plain"): (_ONE, _ONE, _FEW),
    (4, "rotate", Pass.DOMEGA, "plain"): (Tile(2, 512, 2, 168, 2), Tile(2, 512, 2, 168, 2), Tile(2, 512, 2, 168, 2)),
    (4, "cosine", Pass.FORWARD, "tables"): (Tile(4, 128, 1), Tile(4, 128, 1), Tile(4, 128, 1)),
    (4, "cosine", Pass.BACKWARD, "tables"): (Tile(2, 128, 1), Tile(2, 128, 1), Tile(2, 128, 1)),
    (4, "rotate", Pass.FORWARD, "tables"): (Tile(4, 128, 1), Tile(4, 128, 1), Tile(4, 128, 1)),
    (4, "rotate", Pass.BACKWARD, "tables"): (Tile(4, 128, 1), Tile(4, 128, 1), Tile(4, 128, 1)),
}  # fmt: skip
_64 = Tile(1, 512, 4)
NUM_SM = 132  # on the largest GPUs; a fixed number, so dω is summed in the same order on every GPU
REGISTERS = 65536  # per SM
# The cost of a new block of tokens, in blocks of rows (docs/tuning.md).
NEW_TOKENS = 8


def tile(work: Work) -> Tile:
    """Return the tile for this work. The width is the only size that affects it, to avoid recompilation."""
    if work.itemsize == 8:
        return _64._replace(max_registers=255) if work.stage is Pass.DOMEGA else _64
    kind = "tables" if work.tables != "none" else "activated" if work.activated else "plain"
    row = work.itemsize, work.map, work.stage
    tiles = TILES.get((*row, kind)) or TILES[(*row, "plain")]
    return tiles[(work.width > 16) + (work.width > 64)]


def plan(work: Work) -> Plan:
    """Divide the work among programs."""
    block_r, elements, num_warps, max_registers, stages, rows_first = tile(work)
    block_n = max(1, elements // work.width)
    if work.interpreting:  # the cost depends on the number of programs and rows, not on sizes
        block_n = max(16, min(triton.next_power_of_2(work.num_tokens), 32768 // work.width))
        block_r = max(1, min(work.rows, 8 if max_registers is None else 2))
    token_blocks = triton.cdiv(work.num_tokens, block_n)
    block_r = math.gcd(block_r, work.rows_per_weight) if work.rows_per_weight else block_r
    if max_registers is None:
        token_programs, rows_per_program = token_blocks, block_r
    elif work.rows_per_weight:
        programs = 1 if work.interpreting else _count_resident_programs(num_warps, max_registers)
        token_programs, rows_per_program = cut_shared_rows(token_blocks, work, block_r, programs)
    elif work.interpreting:
        token_programs, rows_per_program = work.step, max(1, work.rows)
    else:
        # Start only as many programs as can run at once. Each program has a long walk, because it writes partial sums
        # that must be read again. Registers are the limit: tests/kernels/test_aot.py checks that shared memory
        # suffices.
        programs = _count_resident_programs(num_warps, max_registers)
        programs = max(1, programs // max(1, work.samples) // work.groups)
        token_programs, rows_per_program = cut_rows(token_blocks, work.rows, work.heads, block_r, programs, work.step)
    return Plan(block_r, block_n, num_warps, max_registers, stages, rows_first, token_programs, rows_per_program)


def _count_resident_programs(num_warps: int, max_registers: int) -> int:
    """Return how many programs can run at once."""
    return NUM_SM * (REGISTERS // (32 * num_warps * max_registers))


class HeadsPlan(NamedTuple):
    """Division of the work for a norm over all heads. A program processes all heads of a token together."""

    heads: int  # heads of a tile
    tiles: int
    num_warps: int
    programs: int  # for all tokens of q and of k


# Channels of all heads per thread, channels of a tile per thread, and warps per SM: as many as registers allow. The
# backward pass also keeps dy, and sums of gradients for each channel.
_CHANNELS = {Pass.FORWARD: (40, 8, 12), Pass.BACKWARD: (40, 4, 8), Pass.DOMEGA: (40, 4, 8)}


def plan_heads(heads: int, width: int, items: int, stage: Pass, interpreting: bool) -> HeadsPlan:
    """Divide the work for a norm over all heads among programs.

    ``width`` is the number of channels in a row. ``items`` is the number of tokens in all samples of q and k together.
    """
    if interpreting:
        return HeadsPlan(triton.next_power_of_2(heads), 1, 4, min(items, 2) if stage is Pass.DOMEGA else items)
    channels, tile_size, warps = _CHANNELS[stage]
    num_warps = min(16, max(1, triton.next_power_of_2(triton.cdiv(heads * width, 32 * channels))))
    tile_size = max(1, triton.next_power_of_2(tile_size * 32 * num_warps // width + 1) // 2)
    return HeadsPlan(
        tile_size, triton.cdiv(heads, tile_size), num_warps, min(items, NUM_SM * max(1, warps // num_warps))
    )


@lru_cache(maxsize=4096)
def cut_shared_rows(token_blocks: int, work: Work, block_r: int, programs: int) -> tuple[int, int]:
    """Divide rows like :func:`cut_rows`, but with a number of rows per program that divides ``work.rows_per_weight``.

    There may be more programs than can run at once. Some programs then wait for others to finish.
    """
    best, shortest = (work.step, block_r), math.inf
    for part_rows in (n for n in range(work.rows_per_weight, 0, -block_r) if work.rows_per_weight % n == 0):
        parts = work.groups * (work.rows // part_rows) * work.samples
        token_programs = max(work.step, min(token_blocks, programs // max(1, parts)) // work.step * work.step)
        num_rounds = -(-token_programs * parts // programs)
        walk = num_rounds * -(-token_blocks // token_programs) * (NEW_TOKENS + -(-part_rows // block_r))
        if walk < shortest:
            best, shortest = (token_programs, part_rows), walk
    return best


@lru_cache(maxsize=4096)
def cut_rows(token_blocks: int, rows: int, heads: int, block_r: int, programs: int, step: int) -> tuple[int, int]:
    """Return the number of programs along the tokens and the rows per program that minimise the longest walk.

    A program computes the angles of a block of tokens and then maps its rows. It processes every ``token_programs``-th
    block, as long as there are blocks for all programs. The programs then share the rows of the remaining blocks. All
    programs run at once unless the GPU can run fewer than ``step`` programs.
    """
    row_blocks = max(1, -(-rows // block_r))
    best, shortest = (step, row_blocks * block_r), math.inf
    target_parts = 1
    while target_parts <= programs:
        blocks = -(-row_blocks // target_parts)
        num_parts = math.prod(share_rows(rows, heads, blocks * block_r))
        token_programs = max(step, min(token_blocks, programs // max(1, num_parts)) // step * step)
        rounds, remaining_blocks = divmod(token_blocks, token_programs)
        walk = rounds * (NEW_TOKENS + blocks) + (
            NEW_TOKENS + -(-remaining_blocks * blocks // token_programs) if remaining_blocks else 0
        )
        if token_programs * num_parts <= programs and walk < shortest:
            best, shortest = (token_programs, blocks * block_r), walk
        if blocks == 1:
            break
        target_parts = -(-row_blocks // (blocks - 1))  # the smallest number of parts if each has one block fewer
    return best


def share_rows(rows: int, heads: int, part_rows: int) -> tuple[int, int]:
    """Return how many parts of ``part_rows`` rows a sample has, and how many runs of these parts cover all rows.

    Some of the parts may be empty.
    """
    parts_per_sample, num_parts = -(-heads // part_rows), -(-rows // part_rows)
    return parts_per_sample, -(-num_parts // max(1, parts_per_sample))
