"""Choose tile sizes, the number of passes and the length of pieces for linear attention."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class LinearPass(Enum):
    FORWARD = "forward"  # one pass
    BACKWARD = "backward"
    STATE = "state"  # two passes: k, v → state
    OUTPUT = "output"  # q, state → o
    QUERIES = "queries"  # q, do → dq
    QUERIES_OMEGA = "queries_omega"  # q, do → dq and the sums for dω and dφ
    QUERY_STATE = "query_state"  # q, do → gradient of the state, also with a causal mask
    KEYS = "keys"  # k, v, gradient of the state → dk, dv
    DELTA_KEYS = "delta_keys"  # KEYS with the delta rule
    CAUSAL = "causal"  # two passes with a causal mask: → o
    CAUSAL_QUERIES = "causal_queries"  # → dq
    CAUSAL_KEYS = "causal_keys"  # → dk, dv
    CAUSAL_NORMALIZED = "causal_normalized"  # tiles of CAUSAL with a normalizer, unless other kernels compute it
    CAUSAL_KEYS_NORMALIZED = "causal_keys_normalized"  # as above, for CAUSAL_KEYS
    CAUSAL_DECAY = "causal_decay"  # tiles of CAUSAL with a decay and a map, without a normalizer
    CAUSAL_KEYS_DECAY = "causal_keys_decay"  # tiles of CAUSAL_KEYS with a decay and a map, without a normalizer
    CAUSAL_KEYS_SEPARATE = "causal_keys_separate"  # tiles of CAUSAL_KEYS for a normalizer that other kernels compute
    NORMALIZER = "normalizer"  # q, k → z and, in the backward pass, Z at each token
    NORMALIZER_GRADIENT = "normalizer_gradient"  # q, dz → dZ at each token


NORMALIZED = {
    LinearPass.CAUSAL: LinearPass.CAUSAL_NORMALIZED, LinearPass.CAUSAL_KEYS: LinearPass.CAUSAL_KEYS_NORMALIZED
}  # fmt: skip
DECAYING = {LinearPass.CAUSAL: LinearPass.CAUSAL_DECAY, LinearPass.CAUSAL_KEYS: LinearPass.CAUSAL_KEYS_DECAY}
SEPARATE = {LinearPass.CAUSAL_KEYS: LinearPass.CAUSAL_KEYS_SEPARATE}
NORMALIZERS = (LinearPass.NORMALIZER, LinearPass.NORMALIZER_GRADIENT)
CAUSAL_PASSES = (
    *NORMALIZED, *NORMALIZED.values(), *DECAYING.values(), *SEPARATE.values(), *NORMALIZERS, LinearPass.CAUSAL_QUERIES
)  # fmt: skip


class LinearTile(NamedTuple):
    block_n: int  # tokens
    num_warps: int
    stages: int  # pipeline stages of the loop, which loads stages - 1 blocks of tokens ahead
    max_registers: int | None = None


# Pass -> largest state (in elements) -> tile. Larger states use the last tile. See docs/tuning.md. The size of a state
# depends on how a pass pads or splits its widths. With cosine and head_dim 72, a state has 144 · 80 elements for dq, dk
# and dv, and 144 · 128 in other passes. Causal kernels always pad. With 128 registers, 4 programs of 4 warps fit on a
# multiprocessor. PROGRAMS assumes that. Heads with few channels use 2 warps, because 4 warps would have too little
# work. Twice as many programs can then run at once.
# Names of tiles: tokens, then SMALL (2 warps), WIDE (8 warps), TWO (8 warps, 2 stages), DEEP (4 stages), SHALLOW (2
# stages) or FREE (no register limit).
_16_SMALL = LinearTile(16, 2, 4, 128)
_16, _16_DEEP, _32 = LinearTile(16, 4, 3, 128), LinearTile(16, 4, 4, 128), LinearTile(32, 4, 3, 128)
_16_FREE, _16_DEEP_FREE, _32_FREE = LinearTile(16, 4, 3), LinearTile(16, 4, 4), LinearTile(32, 4, 3)
_64, _64_SHALLOW, _64_ONE = LinearTile(64, 4, 3), LinearTile(64, 4, 2), LinearTile(64, 8, 1)
_16_WIDE, _32_WIDE, _64_WIDE = LinearTile(16, 8, 3), LinearTile(32, 8, 3), LinearTile(64, 8, 3)
_32_TWO, _64_TWO, _32_SHALLOW = LinearTile(32, 8, 2), LinearTile(64, 8, 2), LinearTile(32, 4, 2)
TILES: dict[LinearPass, dict[int, LinearTile]] = {
    LinearPass.FORWARD: {2048: _16_SMALL, 4096: LinearTile(16, 4, 4, 80), 8192: _16_DEEP},
    LinearPass.BACKWARD: {2048: _16_SMALL, 4096: _16_DEEP, 8192: LinearTile(16, 4, 4, 168)},
    LinearPass.STATE: {4096: _32, 8192: _64, 18432: _32_FREE, 20480: _16_DEEP_FREE, 32768: _64_WIDE},
    LinearPass.OUTPUT: {8192: _32, 24576: _64, 32768: LinearTile(32, 8, 1)},
    LinearPass.QUERIES: {
        8192: _16_DEEP, 11520: _16_DEEP_FREE, 12288: _16, 12800: _16_FREE, 16384: _32_FREE, 24576: _16_DEEP_FREE,
        32768: _32_WIDE,
    },
    LinearPass.QUERIES_OMEGA: {
        4096: _16_DEEP, 8192: LinearTile(32, 8, 3, 128), 16384: LinearTile(16, 8, 3, 128), 32768: _32_WIDE
    },
    LinearPass.QUERY_STATE: {
        4096: _32, 8192: _64, 16384: _32_FREE, 18432: _64_WIDE, 20480: _16_DEEP_FREE, 32768: _64_WIDE
    },
    LinearPass.KEYS: {4096: _16, 11520: _32_FREE, 32768: _32_WIDE},
    LinearPass.DELTA_KEYS: {4096: _16, 8192: _32_FREE, 16384: _32_WIDE},
    LinearPass.CAUSAL: {4096: _64, 8192: _64_SHALLOW, 32768: _64_TWO},
    LinearPass.CAUSAL_QUERIES: {4096: _64, 8192: _32_FREE, 16384: _64_ONE, 32768: _32_TWO},
    LinearPass.CAUSAL_KEYS: {4096: _64_SHALLOW, 8192: _16_FREE, 16384: _32_TWO, 32768: _16_WIDE},
    LinearPass.CAUSAL_NORMALIZED: {4096: _64, 8192: _64_SHALLOW, 16384: _64_TWO, 32768: _64_ONE},
    LinearPass.CAUSAL_KEYS_NORMALIZED: {4096: _32_SHALLOW, 8192: _16_FREE, 16384: _32_TWO, 32768: _64_ONE},
    LinearPass.CAUSAL_DECAY: {4096: _64, 8192: _32_FREE, 32768: _64_TWO},
    LinearPass.CAUSAL_KEYS_DECAY: {4096: _32_FREE, 8192: _16_FREE, 16384: _32_TWO, 32768: _16_WIDE},
    LinearPass.CAUSAL_KEYS_SEPARATE: {16384: _16_WIDE, 32768: _64_ONE},  # above SEPARATE_STATE
    LinearPass.NORMALIZER: {32768: _64},  # above SEPARATE_STATE
    LinearPass.NORMALIZER_GRADIENT: {32768: _64},  # above SEPARATE_STATE
}  # fmt: skip
NARROWEST = 16  # minimum number of features, or of channels of v, of a tile on matrix units
# Widths that are split into several tiles. Other widths are padded to a power of two. SUMS is for channels (or pairs)
# of q and k, where forming features takes most instructions. VALUE_SUMS is for channels of v, where a second tile only
# pays off for large widths. The passes in SMALL_VALUE_STATES also split v into SMALL_VALUE_SUMS if the state then has
# at most the given number of elements.
SUMS = {40: (32, 8), 48: (32, 16), 72: (64, 8), 80: (64, 16), 96: (64, 32), 160: (128, 32), 192: (128, 64)}
VALUE_SUMS = {160: (128, 32), 192: (128, 64)}
SMALL_VALUE_SUMS = {80: (64, 16)}
SMALL_VALUE_STATES = {LinearPass.QUERIES: 12800, LinearPass.KEYS: 12288}
WIDEST_OF_OMEGA = 80  # channels; with more, sums for dω leave no registers for a second tile
LARGEST = 2 * 32768  # maximum number of bytes of a state, as operands
PIECE = 128  # tokens; a multiple of every block_n
SHORTEST = 256  # minimum number of tokens in a piece, if there is work for all multiprocessors
FEW_PROGRAMS = 256  # just under two per multiprocessor
SEPARATE_STATE = 8192  # elements; for larger states, other kernels compute an unrotated normaliser with a causal mask
LARGE_STATE = 4096  # elements; for larger states, short pieces don't pay off
STATE_TO_PART = 4  # a part has at least one token for this many elements of a state
# State elements that a program of a scan sums, and pieces that the program loads at once. If there are too few programs
# for all multiprocessors, the second tile is used.
SCAN_TILE, SCAN_TILE_OF_FEW = (512, 4), (64, 64)
# Maximum number of tokens that one program processes in one pass: without and with a backward pass, which needs the
# state. Padded states with more than ONE_PASS_STATE elements leave too few registers for the rest.
ONE_PASS, ONE_PASS_TRAINING, ONE_PASS_STATE = 384, 224, 8192
MULTIPROCESSORS = 132  # on the largest GPUs
PROGRAMS = MULTIPROCESSORS * 4  # programs that run at once; fixed, so all GPUs sum in the same order


def pad_width(width: int) -> tuple[int, ...]:
    """Return the width of a single tile for ``width`` channels."""
    return (max(NARROWEST, 1 << (width - 1).bit_length()),)


def choose_widths(width: int, stage: LinearPass, features: int = 2) -> tuple[int, ...]:
    """Choose the widths of the tiles for ``width`` channels (or pairs) of q and k in a pass.

    Each channel (or pair) has ``features`` features.
    """
    narrowest = NARROWEST // features
    if stage is LinearPass.QUERIES_OMEGA:
        if width > WIDEST_OF_OMEGA:
            return pad_width(width)
        narrowest = NARROWEST
    sums = (SUMS.get(_round_up(width, unit)) for unit in (narrowest, NARROWEST))
    return next(filter(None, sums), pad_width(width))


def choose_value_widths(width: int, stage: LinearPass, features: int) -> tuple[int, ...]:
    """Choose the widths of the tiles for ``width`` channels of v in a pass. ``features`` includes padding."""
    rounded = _round_up(width, NARROWEST)
    if rounded * features <= SMALL_VALUE_STATES.get(stage, 0) and rounded in SMALL_VALUE_SUMS:
        return SMALL_VALUE_SUMS[rounded]
    return VALUE_SUMS.get(rounded, pad_width(width))


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def choose_tile(stage: LinearPass, state: int, itemsize: int, interpreting: bool, regular: bool = True) -> LinearTile:
    """Choose the tile of a pass.

    The tile doesn't depend on the batch size or the numbers of heads and tokens, so changing these never causes
    recompilation. ``regular`` means that rows are 16-byte aligned, and that D_v and each tile of features have at least
    64 channels. In irregular causal kernels, products of 64 tokens make ptxas 12.8 (Triton 3.6) lose the address of an
    operand in shared memory. So these kernels use smaller tiles: products with fewer than 64 rows don't use Hopper's
    warpgroup instructions.
    """
    if interpreting:
        return LinearTile(64, 4, 1)
    if itemsize > 2:  # not tuned
        return LinearTile(16, 8, 1)
    row = TILES[stage]
    tile = next((tile for largest, tile in row.items() if state <= largest), row[max(row)])
    if not regular and stage in CAUSAL_PASSES:
        return tile._replace(block_n=min(tile.block_n, 32))
    return tile


def choose_scan_tile(rows: int, state: int) -> tuple[int, int]:
    """Choose how many elements a scan program sums, and how many pieces it loads at once.

    ``rows`` is the number of key heads.
    """
    is_few = rows * -(-state // SCAN_TILE[0]) < MULTIPROCESSORS
    return SCAN_TILE_OF_FEW if is_few else SCAN_TILE


def fits_kernels(v_dim: int, num_features: int, itemsize: int, delta: bool = False) -> bool:
    """Return whether a state fits into the registers and, as operands, into the shared memory of a program.

    With ``delta``, a matrix (features, features) must also fit.
    """
    return (sum(pad_width(v_dim)) + (num_features if delta else 0)) * num_features <= LARGEST // itemsize


def shrink(tile: LinearTile) -> list[LinearTile]:
    """Return smaller tiles to try on a GPU with too little shared memory for ``tile``."""
    return [tile._replace(stages=1), LinearTile(16, tile.num_warps, 1)]


def choose_divisor(causal: bool, raw: bool) -> int:
    """Return the number by which to divide PROGRAMS for kernels that run fewer programs at once.

    With a causal mask, kernels need twice the registers. If there are no features to compute (``raw``), they are
    limited only by memory bandwidth, so one program per multiprocessor is enough.
    """
    return 1 if not causal else 4 if raw else 2


def cut_pieces(num_tokens: int, rows: int, state: int, divisor: int) -> tuple[int, int]:
    """Return the number and the length of pieces. Pieces are as long as possible while keeping the whole GPU busy.

    Each piece writes a state of ``state`` elements. Large states get longer pieces, because writing more states would
    cost more time than using the whole GPU saves.
    """
    length = _share_tokens(num_tokens, rows, divisor)
    if length < 2 * SHORTEST and state > LARGE_STATE:
        length = _share_tokens(num_tokens, rows, 2 * divisor)
    return max(1, -(-num_tokens // length)), length


def cut_outputs(num_tokens: int, heads: int, length: int) -> tuple[int, int]:
    """Return the number and the length of pieces for programs that write no state.

    Pieces have ``length`` tokens, or fewer if there would otherwise be too few programs.
    """
    if heads * -(-num_tokens // length) < FEW_PROGRAMS:
        length = min(length, _share_tokens(num_tokens, heads, 1))
    return max(1, -(-num_tokens // length)), length


def _share_tokens(num_tokens: int, rows: int, divisor: int) -> int:
    pieces_per_row = max(1, PROGRAMS // divisor // max(1, rows))
    shortest = SHORTEST if rows * num_tokens >= MULTIPROCESSORS * SHORTEST else PIECE
    return max(shortest, -(-num_tokens // (pieces_per_row * PIECE)) * PIECE)


def cut_parts(length: int, programs: int, state: int) -> int:
    """Return the number of tokens per part, for pieces of ``length`` tokens.

    ``programs`` is the number of programs for whole pieces. These programs need fewer registers than causal kernels, so
    more of them can run at once. A part writes a state of ``state`` elements, so the part must be long enough to read
    several times that number.
    """
    parts_per_piece = max(1, PROGRAMS // max(1, programs))
    shortest = max(SHORTEST, state // STATE_TO_PART)
    return min(length, -(-max(shortest, -(-length // parts_per_piece)) // PIECE) * PIECE)
