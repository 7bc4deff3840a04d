"""Validate the arguments of :func:`lrpe_md.linear_attention`, and convert them to a :class:`LinearCall`."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from ...checks import (
    can_read,
    check_boolean,
    check_boundaries,
    check_dense,
    check_offsets,
    invalid_positions,
    or_one,
    plural,
    show_value,
    split_pair,
)
from ...positions.grid import Grid
from ...reference import ACTIVATIONS
from ...reference_linear import Attention
from ..core.call import NO_WEIGHTS, Call, Layout, Spec, Tables, Weights
from ..core.memory import accumulator
from ..core.norms import check_weights, norm_fields
from ..core.operator import check_impl
from ..encode.tables import explain_missing
from ..encode.validate import WHOLE_PACK, check_act, check_input, check_unused, locate, validate
from .call import Directions, LinearCall, LinearOptions, NormalizerName, Operands, Rule, Sides

PACKED = f"q, k and v as (1, H, N, D), with cu_seqlens or {WHOLE_PACK}"
NORMALIZER_NAMES, RULES, DIRECTIONS = get_args(NormalizerName), get_args(Rule), get_args(Directions)
NEVER_NEGATIVE = tuple(name for name, entry in ACTIVATIONS.items() if entry.never_negative)


def validate_linear(
    options: LinearOptions, operands: Operands, sides: Sides, weights: Weights = NO_WEIGHTS
) -> LinearCall:
    """Check all arguments, and return the validated call."""
    attention = _make_attention(options, operands)
    q, k, v, gate, _, decay = operands
    has_position_pair = type(sides.positions) is tuple
    check_input("q", q, q, packed=PACKED)
    other_length = has_position_pair or (options.map is None and sides.positions is None)
    check_input("k", k, q, other_length=other_length, packed=PACKED)
    _check_values(v, q, k)
    check_gate(gate, k)
    if has_position_pair and attention.mask != "full":
        mask_name = "block" if attention.mask == "block" else "is_causal"
        raise ValueError(f"positions: expected the same positions for q and k with {mask_name}, got a pair")
    if q.shape[2] != k.shape[2] and attention.mask != "full":
        raise ValueError(
            f"k: expected the same number of tokens as q ({q.shape[2]}) with a causal or block mask, got {k.shape[2]}"
        )
    if sides.cu_seqlens is not None:
        _check_cu_seqlens(sides.cu_seqlens, q, attention.mask, has_position_pair)
    q_side, k_side = _place_sides(options, q, k, sides)
    spec = q_side.spec if options.norm is None else q_side.spec._replace(**norm_fields(options.norm))
    if attention.mask == "block":
        _check_blocks(q_side.layout, sides.positions, attention.block)
    if decay is not None:
        _check_decay(decay, k, q_side.layout, attention)
    if attention.memory == "add" and attention.block == 1 and not any(q_side.layout.ends):
        attention = attention._replace(mask="causal", block=0)
    call = LinearCall(
        attention, spec, q_side.layout, k_side.layout, q_side.tables, k_side.tables, sides.cu_seqlens, None, weights
    )
    _check_state(call, operands)
    if options.norm is not None:
        for side in (q_side, k_side):
            check_weights(options.encoding, weights, (q, k), side.layout)
    return call


def _make_attention(options: LinearOptions, operands: Operands) -> Attention:
    check_impl(options.impl)
    if options.map not in ("cosine", "rotate", None):
        raise ValueError(f"map: expected 'cosine', 'rotate' or None, got {show_value(options.map)}")
    check_act(options.act, options.dim)
    check_normalizer(options.normalizer, options.act)
    check_eps(options.eps)
    check_boolean("return_state", options.return_state)
    block, causal = options.block, options.is_causal
    if isinstance(causal, str) or (isinstance(causal, Tensor) and causal.numel() != 1):
        raise TypeError(
            f"is_causal: expected True or False, got {show_value(causal)}; for a mask of blocks, such as frames, pass "
            "block=, the number of tokens in a block"
        )
    if block is not None:
        if isinstance(block, bool) or not isinstance(block, (int, torch.SymInt)) or block < 1:
            raise ValueError(
                f"block: expected a positive integer, the number of tokens in a block, got {show_value(block)}"
            )
        if options.is_causal:
            raise ValueError(
                "is_causal: expected False with block=, which already makes attention causal between blocks, got True"
            )
    mask = "causal" if options.is_causal else "full" if block is None else "block"
    rule, directions = options.rule, options.directions
    check_rule(rule, directions)
    if operands.decay is not None and mask == "full":
        raise ValueError("decay: expected is_causal=True or a block, got neither; pass one of them")
    if rule == "delta" and mask == "full":
        raise ValueError("rule: 'delta' needs block=, the number of tokens in a frame, got None")
    if rule == "delta" and (mask == "causal" or block == 1):
        raise ValueError(
            "rule: 'delta' needs blocks of at least 2 tokens, such as a frame, got single tokens; for a "
            "token-by-token delta rule, use the flash-linear-attention library (fla)"
        )
    if directions == "both" and mask != "block":
        raise ValueError("directions: 'both' needs block=, the number of tokens in a frame, got None")
    if directions == "both" and (operands.state or options.return_state):
        name = "state" if operands.state else "return_state"
        raise ValueError(
            f"{name}: expected None with directions='both', which needs the whole sequence; leave out {name}"
        )
    memory = "sum" if operands.decay is None and (rule, directions) == ("add", "forward") else rule
    memory = f"{rule} both" if directions == "both" else memory
    return Attention(options.normalizer, mask, block or 0, float(options.eps), memory)


def check_rule(rule: Any, directions: Any) -> None:
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {RULES}, got {show_value(rule)}")
    if directions not in DIRECTIONS:
        raise ValueError(f"directions: expected one of {DIRECTIONS}, got {show_value(directions)}")


def _check_decay(decay: Any, k: Tensor, layout: Layout, attention: Attention) -> None:
    batch, heads, num_tokens, _ = k.shape
    form = "(H_k or 1,) or (B or 1, H_k or 1, blocks)"
    check_dense("decay", decay, form, k, "k")
    if not decay.is_floating_point():
        raise TypeError(f"decay: expected a floating-point tensor, got {decay.dtype}")
    num_blocks, unit = num_tokens, "token"
    if attention.mask == "block":
        num_blocks, unit = (num_tokens - sum(layout.ends)) // attention.block, "block between prefix and suffix"
    by_head = decay.ndim == 1 and decay.shape[0] in (1, heads)
    by_block = decay.ndim == 3 and decay.shape[0] in (1, batch) and decay.shape[1] in (1, heads)
    if not by_head and not (by_block and decay.shape[2] == num_blocks):
        raise ValueError(
            f"decay: expected shape ({or_one(heads)},) for one decay per key head, or ({or_one(batch)}, "
            f"{or_one(heads)}, {num_blocks}) for one decay per {unit}, got {tuple(decay.shape)}"
        )


def check_decay_range(decay: Tensor | None) -> None:
    """Check that decay factors are in (0, 1], if the host can read them."""
    if decay is None or not can_read(decay) or not decay.numel():
        return
    smallest, largest = decay.detach().aminmax()
    if not (smallest > 0 and largest <= 1):  # also catches NaN
        raise ValueError(
            f"decay: expected factors in (0, 1], got values from {smallest:g} to {largest:g}; use a sigmoid to keep "
            "learned factors in range"
        )


def check_normalizer(normalizer: Any, act: str) -> None:
    """Check the normaliser. "unrotated" needs an activation whose values are never negative."""
    if normalizer not in NORMALIZER_NAMES:
        raise ValueError(f"normalizer: expected one of {NORMALIZER_NAMES}, got {show_value(normalizer)}")
    if normalizer == "unrotated" and act not in NEVER_NEGATIVE:
        raise ValueError(
            f"normalizer: 'unrotated' divides by act(q) · Σ act(k), so it needs an activation that is never negative, "
            f"one of {NEVER_NEGATIVE}, got act={act!r}; pass act='relu' to the encoding, or use "
            "normalizer='none' or 'encoded'"
        )


def check_eps(eps: Any) -> None:
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 < eps < float("inf"):
        raise ValueError(f"eps: expected a finite positive number, got {show_value(eps)}")


def check_sequence_softmax(options: LinearOptions, operands: Operands, sides: Sides) -> None:
    """Raise an error for arguments that don't work with softmax over the sequence. This softmax needs all tokens."""
    reasons = {
        "is_causal": (options.is_causal, "lets tokens see later tokens"),
        "block": (options.block is not None, "lets tokens see later tokens"),
        "cu_seqlens": (sides.cu_seqlens is not None, "would run over all sequences at once"),
        "state": (bool(operands.state) or options.return_state, "needs the whole sequence at once"),
        "gate": (operands.gate is not None, "includes the tokens that a gate removes"),
    }
    for name, (is_passed, reason) in reasons.items():
        if is_passed:
            raise ValueError(f"{name}: a softmax over the sequence (dim=-2) {reason}; use dim=-1")
    positions = sides.positions if type(sides.positions) is tuple else (sides.positions,)
    if any(isinstance(side_positions, Grid) and not side_positions.whole for side_positions in positions):
        raise ValueError("dim: softmax over the sequence (-2) needs the whole sequence, got a shard (start, length)")


def _check_values(v: Tensor, q: Tensor, k: Tensor) -> None:
    check_dense("v", v, "(B, H, N, D_v)")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: expected k's batch, heads and tokens, {tuple(k.shape[:3])}, and any head_dim, got {tuple(v.shape)}"
        )
    if v.shape[3] < 1:
        raise ValueError(f"v: expected a positive head_dim, got {tuple(v.shape)}")
    if v.dtype != q.dtype or v.device != q.device:
        raise ValueError(f"v: expected q's dtype and device, {q.dtype} on {q.device}, got {v.dtype} on {v.device}")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k: expected a number of heads that divides q's {q.shape[1]} (GQA), got {k.shape[1]} in a tensor of shape "
            f"{tuple(k.shape)}"
        )


def check_gate(gate: Any, k: Tensor) -> None:
    if gate is None:
        return
    batch, heads, num_tokens, _ = k.shape
    check_dense("gate", gate, "(B, H_k or 1, N)", k, "k")
    if not (gate.dtype == torch.bool or gate.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)):
        raise TypeError(f"gate: expected a boolean or floating-point tensor, got {gate.dtype}")
    if gate.ndim != 3 or gate.shape[0] != batch or gate.shape[1] not in (1, heads) or gate.shape[2] != num_tokens:
        raise ValueError(
            f"gate: expected shape (B, H_k or 1, N) = ({batch}, {or_one(heads)}, {num_tokens}), one weight per key, "
            f"got {tuple(gate.shape)}"
        )


def _check_cu_seqlens(cu_seqlens: Any, q: Tensor, mask: str, has_position_pair: bool) -> None:
    check_boundaries(cu_seqlens, q, "q")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected packed sequences in q of shape (1, H, N, D), got {tuple(q.shape)}")
    if mask == "block":
        raise ValueError("block: expected None with cu_seqlens, got both; call once per sequence instead")
    if has_position_pair:
        raise ValueError("positions: expected the same positions for q and k with cu_seqlens, got a pair")
    check_offsets(cu_seqlens, q.shape[2])


def _check_blocks(layout: Layout, positions: Any, block: int) -> None:
    num_grid = layout.num_grid_tokens
    if num_grid % block:
        raise ValueError(
            f"block: expected a divisor of {num_grid}, the number of tokens between prefix and suffix, got {block}; "
            "for a video, pass the number of tokens in a frame"
            + (
                ""
                if isinstance(positions, Grid)
                else ", and for tokens before the first block, pass Coordinates(..., prefix=)"
            )
        )
    check_edges(layout, positions.total if isinstance(positions, Grid) else layout.num_tokens, block)


def check_edges(layout: Layout, total: int, block: int) -> None:
    """Check that a shard of a sequence of ``total`` tokens contains only whole blocks."""
    num_tokens, prefix, num_grid, start, _ = layout
    for edge in (start, start + num_tokens):
        grid_index = edge - prefix
        if not (edge == 0 or edge == total or (0 <= grid_index <= num_grid and grid_index % block == 0)):
            raise ValueError(
                f"block: expected each shard to contain whole blocks of {block} tokens (prefix and suffix are separate "
                f"blocks), got tokens {start} to {start + num_tokens} after a prefix of {prefix}"
            )


def _check_state(call: LinearCall, operands: Operands) -> None:
    q, k, v, _, state, _ = operands
    if not state:
        return
    expected, normalizer = call.state_sizes(k, v), call.attention.normalizer
    form = "(S, Σ)" if len(expected) == 2 else "(S, None)"
    if len(state) != len(expected):
        raise ValueError(
            f"state: expected {form} of shapes {expected} with normalizer={normalizer!r}, got "
            f"{plural(len(state), 'tensor')}"
        )
    dtype = accumulator(q.dtype)
    for t, shape in zip(state, expected, strict=True):
        check_dense("state", t, form)
        if tuple(t.shape) != shape:
            raise ValueError(
                f"state: expected {form} of shapes {expected}, as returned for these sizes with return_state=True, "
                f"got {[tuple(t.shape) for t in state]}"
            )
        if t.dtype != dtype or t.device != q.device:
            raise ValueError(f"state: expected {dtype} on {q.device}, got {t.dtype} on {t.device}")


# --- positions of q and k -------------------------------------------------------------------------------------------


def _place_sides(options: LinearOptions, q: Tensor, k: Tensor, sides: Sides) -> tuple[Call, Call]:
    """Return the spec, layout and tables of q and of k, without the norm."""
    for phi in sides.phase if type(sides.phase) is tuple else (sides.phase,):
        if isinstance(phi, Tensor) and phi.ndim == 3:
            raise ValueError(f"phase: expected one group, shape (H or 1, channels or pairs), got {tuple(phi.shape)}")
    if options.map is None:
        return _place_without_map(options, q, k, sides)
    if sides.omega is None:
        raise ValueError(
            f"omega: expected a tensor of shape (H or 1, channels or pairs, axes) with map={options.map!r}, got None"
        )
    if sides.positions is None:
        raise ValueError(explain_missing(sides.omega, f"coordinates with map={options.map!r}"))
    omega: Any = sides.omega
    _, positions, phase, amplitude, _ = sides
    plain_options = options.encoding._replace(norm=None)
    if type(positions) is not tuple and type(phase) is not tuple:
        side = validate(plain_options, (q, k), omega, positions, phase, amplitude)
        return side, side
    if type(positions) is tuple and positions and isinstance(positions[0], int):
        raise invalid_positions(positions)
    position_and_phase_pairs = split_pair("positions", positions), split_pair("phase", phase)
    q_side, k_side = (
        validate(plain_options, (x,), omega, side_positions, phi, amplitude)
        for x, side_positions, phi in zip((q, k), *position_and_phase_pairs, strict=True)
    )
    # Both sides use the same amplitude tensor, even if it was created from a number.
    return q_side, k_side._replace(tables=k_side.tables._replace(amplitude=q_side.tables.amplitude))


def make_empty_frequencies(q: Tensor) -> Tensor:
    """Return empty frequencies of shape (1, 0, 0), which stand in for omega if there is no map."""
    return torch.empty((1, 0, 0), dtype=torch.float32, device=q.device)


def _place_without_map(options: LinearOptions, q: Tensor, k: Tensor, sides: Sides) -> tuple[Call, Call]:
    """Return both sides for map=None. Positions only determine the numbers of prefix and suffix tokens."""
    check_unused(options, "pairs", "rotary_dim", "order")
    for name, value in (("omega", sides.omega), ("phase", sides.phase), ("amplitude", sides.amplitude)):
        if value is not None:
            raise ValueError(f"{name}: expected None with map=None, which has no angles, got {type(value).__name__}")
    for name, x in (("q", q), ("k", k)):
        if x.shape[3] < 1:
            raise ValueError(f"{name}: expected a positive head_dim, got {tuple(x.shape)}")
    spec, tables = Spec("none", options.act, options.dim or 0), Tables(make_empty_frequencies(q))
    places = []
    for x, positions in zip((q, k), split_pair("positions", sides.positions), strict=True):
        num_tokens = x.shape[2]
        layout = Layout(num_tokens, 0, num_tokens, 0, ()) if positions is None else locate(positions, x)[0]
        places.append(Call(spec, layout._replace(sizes=()), tables))
    return places[0], places[1]
