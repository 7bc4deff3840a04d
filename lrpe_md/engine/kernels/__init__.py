"""Triton kernels. angles: a token's index to cos Θ and sin Θ. activations. tiles: loads and stores. encode: both maps,
forward and backward. sums: the second pass of dω, and softmax over the sequence. signature: what a kernel is compiled
for.

The formula is that of ``reference.py``. Names: p_ pointer, o_ offsets, m_ mask; tiles in registers carry no prefix; s
position, w frequency; BLOCK_R rows (a row is a head of a sample), BLOCK_N tokens and BLOCK_C channels (cosine) or pairs
(rotate) a tile. Sizes are run-time arguments throughout.
"""

from .encode import lrpe_kernel
from .reduce import reduce_partial_kernel
from .softmax import softmax_sequence_kernel

__all__ = ["lrpe_kernel", "reduce_partial_kernel", "softmax_sequence_kernel"]
