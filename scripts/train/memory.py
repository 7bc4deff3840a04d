"""Linear attention layers for `train recall`, whose state adds, forgets or overwrites values.

Shapes: B batch, N tokens, C embed_dim, H heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lrpe_md import HeadDecay
from lrpe_md.checks import repeat_over_layers
from lrpe_md.engine.encode.views import split_qkv
from lrpe_md.engine.linear.call import Rule
from lrpe_md.integrations.attention import NOTHING, Context
from lrpe_md.integrations.timm import LrpeAttention
from lrpe_md.modules.linear import attend_with
from lrpe_md.reference import activate

from ...models.video import LrpeVideoTransformer

MemoryName = Literal["add", "decay", "delta"]
HALF_LIVES = 1.0, 16.0  # in frames, for the first and the last head


class MemoryAttention(LrpeAttention):
    """Linear attention over frames like :class:`LrpeAttention`, with an additional gate for each token and head.

    The gate is the sigmoid of a linear layer, and determines how strongly a token is written to the state. The weight
    of the keys' norm is initially 1/√D, so a key's length is at most about 1. With the delta rule, a gate of 1 then
    replaces the value that was written with the same key, and :func:`limit_gate` keeps the state stable. In contrast,
    the delta rule of a :class:`lrpe_md.Memory` has no gate and weights all keys of a frame equally.
    """

    rule: Rule
    write_gate: nn.Linear

    def remember(self, memory: MemoryName) -> None:
        """Set the kind of memory, and create its parameters.

        Args:
            memory: "add" sums over all frames. "decay" forgets frames at a learned rate per head. "delta" forgets
                nothing, but a new value replaces the earlier value with the same key.
        """
        self.rule = "delta" if memory == "delta" else "add"
        device, heads = self.qkv.weight.device, self.num_heads
        self.write_gate = nn.Linear(self.qkv.in_features, heads, device=device)
        shortest, longest = map(math.log2, HALF_LIVES)
        lives = torch.logspace(shortest, longest, heads, base=2, device="cpu")
        decays = 0.5 ** (1 / lives)
        self.decay = HeadDecay(heads, decays, learnable=True, device=device) if memory == "decay" else None
        nn.init.constant_(self.k_norm.weight, self.head_dim**-0.5)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor, attn_mask: Context | Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Compute attention for x (B, N, C).

        ``attn_mask`` is the :class:`Context` of a video model with causal attention between frames.
        """
        assert isinstance(attn_mask, Context)
        q, k, v = split_qkv(self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)))
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)  # under autocast, norms run in float32
        encoding = NOTHING if attn_mask.encoding is None else attn_mask.encoding
        gate = self.write_gate(x).sigmoid().transpose(1, 2)
        if self.rule == "delta" and attn_mask.block is not None:
            k_bar = k if self.feature_act is None else activate(k, self.feature_act)
            _, k_hat = encoding(q, k_bar, positions=attn_mask.positions)
            gate = limit_gate(gate, k_hat, attn_mask.block)
        out = attend_with(
            encoding, q, k, v, attn_mask.positions, normalizer=self.normalizer, gate=gate, block=attn_mask.block,
            decay=None if self.decay is None else self.decay(), rule=self.rule, act=self.feature_act,
        )  # fmt: skip
        return self._project(out, None)


def limit_gate(gate: Tensor, k: Tensor, block: int) -> Tensor:
    """Scale down the gate of each frame where necessary, so that the delta rule is stable.

    A frame multiplies the state by I − A with A = Σ β k kᵀ. If an eigenvalue of A exceeds 2, the state grows from frame
    to frame without bound. No eigenvalue exceeds the maximum of Σ_m' |√β_m k_m · √β_m' k_m'| over the keys m of the
    frame. If this maximum is above 1, the frame's gates are divided by it.

    Args:
        gate: gate β (B, H, N).
        k: encoded keys (B, H, N, E).
        block: number of tokens in a frame, which must divide N.
    """
    weighted = (k * gate.sqrt()[..., None]).unflatten(2, (-1, block))
    bound = (weighted @ weighted.mT).abs().sum(-1).amax(-1, keepdim=True).clamp_min(1)
    return (gate.unflatten(2, (-1, block)) / bound).flatten(2)


def build_model(*, attention: str | Sequence[str], depth: int, **arguments: Any) -> LrpeVideoTransformer:
    """Build a video model with causal attention between frames and with an output for each token.

    Args:
        attention: "softmax" or a memory of linear attention, or a sequence of these that repeats over the layers.
        depth, arguments: arguments of :class:`LrpeVideoTransformer`.
    """
    names = repeat_over_layers("attention", attention, depth, ("softmax", *get_args(MemoryName)))
    normalizer = arguments.pop("normalizer", "none")
    if set(names) != {"softmax"}:
        arguments["normalizer"] = normalizer
    model = LrpeVideoTransformer(
        depth=depth, causal="frames", class_token=False, global_pool="", qk_norm=True, scale_attn_norm=True,
        attention=["softmax" if name == "softmax" else "linear" for name in names],
        **arguments,
    )  # fmt: skip
    blocks: Any = model.blocks
    for name, block in zip(names, blocks, strict=True):
        if name != "softmax":
            block.attn.__class__ = MemoryAttention
            block.attn.remember(name)
    return model
