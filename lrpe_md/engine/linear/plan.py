"""Divide the work of linear attention: tiles, one pass or two, and pieces of the tokens."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = [
    "PIECE", "LinearPass", "LinearTile", "Walk", "choose_scan_tile", "choose_tile", "choose_value_widths",
    "choose_walk", "choose_widths", "cut_outputs", "cut_parts", "cut_pieces", "fits_kernels", "pad_width", "shrink",
]  # fmt: skip


class LinearPass(Enum):
    FORWARD = "forward"  # one pass
    BACKWARD = "backward"
    STATE = "state"  # two passes: k, v to the state
    OUTPUT = "output"  # q to o
    QUERIES = "queries"  # q, do to dq
    QUERIES_OMEGA = "queries_omega"  # q, do to dq and the sums for dω and dφ
    QUERY_STATE = "query_state"  # q, do to the gradient of the state, also with a causal mask
    KEYS = "keys"  # k, v and that gradient to dk and dv
    CAUSAL = "causal"  # two passes with a causal mask: to o
    CAUSAL_QUERIES = "causal_queries"  # to dq
    CAUSAL_KEYS = "causal_keys"  # to dk and dv


CAUSAL_PASSES = (LinearPass.CAUSAL, LinearPass.CAUSAL_QUERIES, LinearPass.CAUSAL_KEYS)


class LinearTile(NamedTuple):
    block_n: int  # tokens
    num_warps: int
    stages: int  # of a loop: so many less one blocks of tokens are on their way
    max_registers: int | None = None


# Pass -> tiles for states of up to 2,048 elements, 4,096, 8,192, 16,384, 24,576, more. See docs/tuning.md.
# Causal kernels and sums for dω pad, so no state of theirs has between 16,384 and 24,576: an entry less in their rows.
# 128 registers: 4 programs of 4 warps fit a multiprocessor, which is what PROGRAMS counts on.
# 2 warps: a head of few channels is little work for 4, and twice as many programs run at once.
_16_SMALL = LinearTile(16, 2, 4, 128)
_16, _16_DEEP, _32 = LinearTile(16, 4, 3, 128), LinearTile(16, 4, 4, 128), LinearTile(32, 4, 3, 128)
_32_FREE, _64, _64_SHALLOW = LinearTile(32, 4, 3), LinearTile(64, 4, 3), LinearTile(64, 4, 2)
_32_WIDE, _64_WIDE, _64_TWO = LinearTile(32, 8, 3), LinearTile(64, 8, 3), LinearTile(64, 8, 2)
_32_TWO, _16_TWO = LinearTile(32, 8, 2), LinearTile(16, 8, 2)
TILES: dict[LinearPass, tuple[LinearTile, ...]] = {
    LinearPass.FORWARD: (_16_SMALL, LinearTile(16, 4, 4, 80), _16_DEEP, _32_TWO, _32_TWO, _32_TWO),
    LinearPass.BACKWARD: (_16_SMALL, _16_DEEP, LinearTile(16, 4, 4, 168), _32_TWO, _16_TWO, _16_TWO),
    LinearPass.STATE: (_32, _32, _64, _32_FREE, _64_WIDE, _64_WIDE),
    LinearPass.OUTPUT: (_32, _32, _32, _64, _64, LinearTile(32, 8, 1)),
    LinearPass.QUERIES: (_16_DEEP, _16_DEEP, _16_DEEP, _32_FREE, LinearTile(16, 4, 4), _32_WIDE),
    LinearPass.QUERIES_OMEGA: (_16_DEEP, _16_DEEP, LinearTile(32, 8, 3, 128), LinearTile(16, 8, 3, 128), _32_WIDE),
    LinearPass.QUERY_STATE: (_32, _32, _64, _32_FREE, _64_WIDE, _64_WIDE),
    LinearPass.KEYS: (_16, _16, _32_FREE, _32_WIDE, _32_WIDE, _32_WIDE),
    LinearPass.CAUSAL: (_64, _64, _64_SHALLOW, _64_TWO, _64_TWO),
    LinearPass.CAUSAL_QUERIES: (_64, _64, _32_FREE, LinearTile(64, 8, 1), _32_TWO),
    LinearPass.CAUSAL_KEYS: (_64_SHALLOW, _64_SHALLOW, LinearTile(16, 4, 3), _32_TWO, LinearTile(16, 8, 3)),
}  # fmt: skip
BOUNDS = (2048, 4096, 8192, 16384, 24576)
NARROWEST = 16  # channels of a tile: matrix units take no less
# Widths that are cut into tiles of powers of two; others are padded to the next one. Channels of q and k, or pairs of
# them: forming features takes most instructions. Channels of v: a second tile of less than 64 costs more than it saves.
SUMS = {48: (32, 16), 80: (64, 16), 96: (64, 32), 160: (128, 32), 192: (128, 64)}
VALUE_SUMS = {160: (128, 32), 192: (128, 64)}
WIDEST_OF_OMEGA = 80  # channels; sums for dω take the registers that a second tile of more would need
LARGEST = 2 * 32768  # bytes of a state as operands
PIECE = 128  # tokens: a multiple of every block of tokens
SHORTEST = 256  # tokens of a piece, where pieces give all multiprocessors work
FEW_PROGRAMS = 256  # less than two on each multiprocessor
LARGE_STATE = 4096  # elements, from which on short pieces don't pay
STATE_TO_PART = 4  # elements of a state for a token of a part
# Elements of a state that a program of a scan sums up, and pieces whose loads are on their way: where there are many
# programs, and where there are few.
SCAN_TILE, SCAN_TILE_OF_FEW = (1024, 1), (512, 16)
ONE_PASS = 384  # tokens that one program goes through
MULTIPROCESSORS = 132  # of the largest GPUs
PROGRAMS = MULTIPROCESSORS * 4  # that run at once; a fixed number, so that sums are in the same order on all GPUs


def pad_width(width: int) -> tuple[int, ...]:
    """Return one tile for so many channels."""
    return (max(NARROWEST, 1 << (width - 1).bit_length()),)


def choose_widths(width: int, stage: LinearPass) -> tuple[int, ...]:
    """Choose the tiles that so many channels of q and k, or pairs of them, are cut into in a pass."""
    if stage is LinearPass.QUERIES_OMEGA and width > WIDEST_OF_OMEGA:
        return pad_width(width)
    return SUMS.get(-(-width // NARROWEST) * NARROWEST, pad_width(width))


def choose_value_widths(width: int) -> tuple[int, ...]:
    """Choose the tiles that so many channels of v are cut into."""
    return VALUE_SUMS.get(-(-width // NARROWEST) * NARROWEST, pad_width(width))


def choose_tile(stage: LinearPass, state: int, itemsize: int, interpreting: bool, regular: bool = True) -> LinearTile:
    """Choose the tile of a pass. Sizes never choose another compiled kernel.

    regular: rows begin at multiples of 16 bytes, and D_v and each tile of features have at least 64 channels. In other
    causal kernels, products of 64 tokens make ptxas 12.8 (Triton 3.6) lose the address of an operand in shared memory,
    so these tiles are smaller: products of less than 64 rows don't use Hopper's warpgroup instructions.
    """
    if interpreting:
        return LinearTile(64, 4, 1)
    if itemsize > 2:  # not tuned
        return LinearTile(16, 8, 1)
    row = TILES[stage]
    tile = row[min(sum(state > bound for bound in BOUNDS), len(row) - 1)]
    if not regular and stage in CAUSAL_PASSES:
        return tile._replace(block_n=min(tile.block_n, 32))
    return tile


def choose_scan_tile(rows: int, state: int) -> tuple[int, int]:
    """Choose the elements and the pieces in flight of a program that sums states of so many heads."""
    few = rows * -(-state // SCAN_TILE[0]) < PROGRAMS
    return SCAN_TILE_OF_FEW if few else SCAN_TILE


def fits_kernels(v_dim: int, num_features: int, itemsize: int, delta: bool = False) -> bool:
    """A program has a whole state at hand, in registers and, as operands, in shared memory.

    delta: also a matrix of features by features.
    """
    return (sum(pad_width(v_dim)) + delta * num_features) * num_features <= LARGEST // itemsize


def shrink(tile: LinearTile) -> list[LinearTile]:
    """List smaller tiles, to try in turn on a GPU with less shared memory than a tile takes."""
    return [tile._replace(stages=1), LinearTile(16, tile.num_warps, 1)]


class Walk(Enum):
    """Kind of loop over the tokens of a chunk. Its value divides PROGRAMS: so many fewer programs run at once."""

    SUM = 1
    CAUSAL = 2  # they take twice the registers
    RAW_CAUSAL = 4  # which wait for memory alone: one on each multiprocessor keeps it busy


def choose_walk(causal: bool, raw: bool) -> Walk:
    return Walk.SUM if not causal else Walk.RAW_CAUSAL if raw else Walk.CAUSAL


def cut_pieces(num_tokens: int, rows: int, state: int, walk: Walk) -> tuple[int, int]:
    """Pieces, and tokens a piece, so that as many programs run as there is room for, each with a long way to go.

    state: elements of one, which each piece leaves. Where pieces are short, large ones cost more than programs to fill
    the room gain.
    """
    length = _share_tokens(num_tokens, rows, walk.value)
    if length < 2 * SHORTEST and state > LARGE_STATE:
        length = _share_tokens(num_tokens, rows, 2 * walk.value)
    return max(1, -(-num_tokens // length)), length


def cut_outputs(num_tokens: int, heads: int, length: int) -> tuple[int, int]:
    """Return the same of programs that leave no state: shorter pieces where those of ``length`` are few."""
    if heads * -(-num_tokens // length) < FEW_PROGRAMS:
        length = min(length, _share_tokens(num_tokens, heads, 1))
    return max(1, -(-num_tokens // length)), length


def _share_tokens(num_tokens: int, rows: int, divisor: int) -> int:
    wanted = max(1, PROGRAMS // divisor // max(1, rows))
    shortest = SHORTEST if rows * num_tokens >= MULTIPROCESSORS * SHORTEST else PIECE
    return max(shortest, -(-num_tokens // (wanted * PIECE)) * PIECE)


def cut_parts(length: int, programs: int, state: int) -> int:
    """Tokens a part of a piece of ``length``, where so many programs would sum up the states of whole pieces.

    They take no more registers than those without a mask: pieces for a causal walk leave room for more of them. state:
    elements of one, which is written and read again for each part: k and v of a part are several times as much.
    """
    wanted = max(1, PROGRAMS // max(1, programs))
    shortest = max(SHORTEST, state // STATE_TO_PART)
    return min(length, -(-max(shortest, -(-length // wanted)) // PIECE) * PIECE)
