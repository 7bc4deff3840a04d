"""Triton kernels.

- encode: both maps, forward and backward.
- heads: both maps after a norm over all heads.
- angles, tables: cos Θ and sin Θ, computed from token indices or loaded from the caller's tables.
- activations, norm, softmax: steps before the map. Softmax is over features or over the sequence.
- features: q̂ and k̂ of linear attention.
- linear, linear_causal: linear attention without and with a causal mask.
- decay: states that decay from token to token.
- memory: states that decay or follow the delta rule from block to block.
- reduce: sums of the partial gradients of ω, φ and a norm's weights.
- rows, tiles, signature: arithmetic on rows, loads and stores, and the choice of specialised arguments.
- fixed: kernels with numeric arguments compiled in, for compilers.

The formulas are the same as in ``reference.py``. Names have the prefix p_ for a pointer, o_ for offsets and m_ for a
mask. Tiles in registers have no prefix. s is a position and w a frequency. V holds all compile-time settings
(:class:`engine.core.call.Variant`). A tile has V.block_n tokens and V.block_c channels (cosine) or pairs (rotate). A
row is one head of one sample, and a program handles V.block_r rows at a time. Sizes are always run-time arguments.

In Triton 3.6, the fields of V are plain numbers. Shapes and ranges need a constexpr, so we assign the fields to local
constexprs.
"""

from .encode import lrpe_kernel
from .heads import heads_kernel
from .linear import (
    linear_backward_kernel,
    linear_decay_query_state_kernel,
    linear_decay_state_kernel,
    linear_forward_kernel,
    linear_key_gradient_kernel,
    linear_output_kernel,
    linear_query_gradient_kernel,
    linear_query_state_kernel,
    linear_scan_kernel,
    linear_state_kernel,
)
from .linear_causal import (
    linear_causal_forward_kernel,
    linear_causal_key_kernel,
    linear_causal_normalizer_gradient_kernel,
    linear_causal_normalizer_kernel,
    linear_causal_query_kernel,
)
from .memory import (
    linear_memory_key_kernel,
    linear_memory_scan_kernel,
    linear_transition_gradient_kernel,
    linear_transition_kernel,
)
from .reduce import reduce_partial_kernel
from .softmax import softmax_sequence_kernel

__all__ = [
    "heads_kernel", "linear_backward_kernel", "linear_causal_forward_kernel", "linear_causal_key_kernel",
    "linear_causal_normalizer_gradient_kernel", "linear_causal_normalizer_kernel", "linear_causal_query_kernel",
    "linear_decay_query_state_kernel", "linear_decay_state_kernel",
    "linear_forward_kernel", "linear_key_gradient_kernel", "linear_memory_key_kernel", "linear_memory_scan_kernel",
    "linear_output_kernel", "linear_query_gradient_kernel", "linear_query_state_kernel",
    "linear_scan_kernel", "linear_state_kernel", "linear_transition_gradient_kernel", "linear_transition_kernel",
    "lrpe_kernel",
    "reduce_partial_kernel", "softmax_sequence_kernel",
]  # fmt: skip
