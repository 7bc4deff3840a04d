"""A compact causal language model that supports every encoding of q and k.

The model has pre-norm blocks with RMSNorm and SwiGLU, grouped-query attention, and tied embeddings. When decoding,
softmax attention uses a static cache of encoded keys, and linear attention uses a state of constant size; see
:mod:`lrpe_md.models.lm_decode`. ``model.rescale`` rescales the frequencies in place at run time.

Shapes: B batch, N tokens, C dim, H query heads, G key heads, R = H / G, D head_dim, E width of encoded keys (2D with
cosine, D otherwise), L length of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from timm.layers.mlp import SwiGLU
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_md import Grid, list_presets
from lrpe_md.checks import can_read, check_at_least, repeat_over_layers
from lrpe_md.engine.encode.views import split_qkv
from lrpe_md.integrations.attention import ATTENTIONS, AttentionKind, attend_encoded, check_memory, softmax_attention
from lrpe_md.integrations.encoding import Activation, EncodingStack, build_encoding
from lrpe_md.integrations.run_time import set_scaling
from lrpe_md.modules.linear import Memory, attend_with
from lrpe_md.presets.registry import find_scheme
from lrpe_md.presets.scheme import Preset, Scaling, Scheme, rotated_part
from lrpe_md.reference import ACTIVATIONS, Act

__all__ = ["Cache", "CausalLm", "LmConfig", "Scaling", "check_room", "check_tokens"]

ENCODINGS = ("rotate", "cosine", "none")
ACTS = tuple(name for name, entry in ACTIVATIONS.items() if not entry.dims)  # elementwise


@dataclass(frozen=True)
class LmConfig:
    """Architecture of a :class:`CausalLm`.

    Args:
        hidden: hidden width of the SwiGLU layers.
        encoding: map of q and k, "rotate", "cosine", or "none" for no positions. You can also pass a scheme with one
            axis, as a name from :func:`lrpe_md.list_presets`, a Scheme or a Preset. act, phase, learnable and base
            override the scheme if they differ from their defaults.
        act: elementwise activation before the map, in all layers. encoding="cosine" with act="softplus" and a phase is
            PoPE (arXiv 2509.10534).
        phase: whether to learn a phase for each layer, key head and channel. The phase only applies to keys, because
            the same phase on q and k would cancel out.
        learnable: whether to learn the frequencies, separately for each layer and key head.
        base: base of the geometric series of frequencies.
        attention: "softmax" or "linear" for all layers, or a sequence of these that repeats over the layers. "linear"
            uses an RMSNorm after the attention instead of a denominator (TransNormer, arXiv 2210.10340), so features
            may be negative.
        memory: a :class:`lrpe_md.Memory` with a decay to define how linear layers forget earlier tokens. On a GPU, the
            slower reference implementation computes the gradient of learned decays.
        keep_encoded: if False, softmax attention re-encodes q and k in the backward pass instead of storing them.

    Raises:
        ValueError: if a name is unknown, or sizes don't divide evenly.
    """

    vocab_size: int = 256
    dim: int = 384
    depth: int = 6
    num_heads: int = 6
    num_kv_heads: int = 2
    hidden: int = 1024
    encoding: str | Scheme | Preset = "rotate"
    act: Act = "none"
    phase: bool = False
    learnable: bool = False
    base: float = 10000.0
    attention: AttentionKind | Sequence[AttentionKind] = "softmax"
    memory: Memory | None = None
    keep_encoded: bool = True

    def __post_init__(self) -> None:
        encodings = ENCODINGS if self.scheme is None else (self.encoding,)
        for name, known in (("encoding", encodings), ("act", ACTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {known}, got {getattr(self, name)!r}")
        for name in ("vocab_size", "dim", "depth", "num_heads", "num_kv_heads", "hidden"):
            check_at_least(1, **{name: getattr(self, name)})
        check_memory(self.memory, self.kinds)
        if self.memory is not None and (self.memory.rule, self.memory.directions) != ("add", "forward"):
            raise ValueError(
                "memory: expected rule='add' and directions='forward' in a causal language model, got "
                f"{self.memory}; for a token-by-token delta rule, use the flash-linear-attention library (fla)"
            )
        if self.dim % self.num_heads:
            raise ValueError(f"dim: expected a multiple of num_heads = {self.num_heads}, got {self.dim}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.encoding == "none" and (self.phase or self.learnable):
            raise ValueError(
                "phase, learnable: expected False with encoding='none', which has no phase and nothing to learn"
            )
        if self.scheme is not None and self.scheme.frequencies.num_axes != 1:
            raise ValueError(
                f"encoding: expected a scheme with one axis, got one with {self.scheme.frequencies.num_axes}"
            )
        if self.map == "rotate" and self.head_dim % 2:
            raise ValueError(
                f"dim: expected an even dim / num_heads for a rotation, got {self.dim} / {self.num_heads} = "
                f"{self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @cached_property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """Attention type of each layer, "softmax" or "linear"."""
        return repeat_over_layers("attention", self.attention, self.depth, ATTENTIONS)

    @property
    def scheme(self) -> Scheme | None:
        """Scheme of the encoding, or None for "rotate", "cosine" and "none"."""
        if isinstance(self.encoding, Preset):
            return self.encoding.scheme
        if isinstance(self.encoding, Scheme):
            return self.encoding
        return find_scheme(self.encoding)[1] if self.encoding in list_presets() else None

    @property
    def map(self) -> str:
        return self.encoding if isinstance(self.encoding, str) and self.scheme is None else self.scheme.map  # pyright: ignore[reportOptionalMemberAccess]

    @property
    def key_dim(self) -> int:
        if self.map != "cosine":
            return self.head_dim
        part = None if self.scheme is None else rotated_part(self.scheme, self.head_dim, None)
        return 2 * self.head_dim if part is None else self.head_dim + part.stop - part.start


def build_layers(config: LmConfig) -> EncodingStack:
    """Build the encodings of q (B, H, N, D) and k (B, G, N, D), one per layer."""
    if config.encoding == "none":
        return EncodingStack([Activation(config.act) for _ in range(config.depth)])
    kwargs: dict[str, Any] = {
        "base": config.base, "act": config.act, "learnable": config.learnable, "phase": "k" if config.phase else False,
        "sharing": "layer",
    }  # fmt: skip
    if config.scheme is None:
        kwargs["heads"] = "own" if config.phase or config.learnable else "shared"
    else:  # non-default options override the scheme
        given = {
            name: getattr(config, name) != getattr(LmConfig, name) for name in ("base", "act", "learnable", "phase")
        }
        kwargs = {name: value for name, value in kwargs.items() if given.get(name, True)}
    layers: Any = build_encoding(config.encoding, kwargs, config.head_dim, config.num_kv_heads, config.depth, 1)
    for layer in layers:
        layer.adjust()  # add the buffers of `CausalLm.rescale` before a step is compiled or captured
    return EncodingStack(layers)


# --- attention -------------------------------------------------------------------------------------------------------


class Context(NamedTuple):
    """Inputs that each attention layer receives in a forward pass."""

    positions: Grid | Tensor
    rows: Any = None  # (N,), cache rows to write these tokens to
    start: Any = None  # (), the first of these rows
    mask: Tensor | None = None  # for softmax attention: whether a query attends to a cached key, (B, 1, R · N, L)
    gate: Tensor | None = None  # for linear attention: False for padding, (B, 1, N)


class LmAttention(nn.Module):
    """Causal grouped-query attention for x (B, N, C)."""

    def __init__(self, config: LmConfig, encoding: nn.Module | None, index: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.linear, self.keep_encoded = config.kinds[index] == "linear", config.keep_encoded
        self.encoding: Any = encoding
        self.qkv = nn.Linear(config.dim, (self.heads + 2 * self.groups) * self.head_dim, bias=False)
        memory = config.memory if self.linear else None
        self.decay = None if memory is None else memory.build_decay(self.groups, index, config.depth)
        self.norm = nn.RMSNorm(config.dim, eps=1e-6) if self.linear else nn.Identity()
        self.proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, context: Context, layer: tuple[Tensor, ...] = ()) -> Tensor:
        q, k, v = split_qkv(self.qkv(x).unflatten(-1, (-1, self.head_dim)), self.groups)
        x = (self._linear if self.linear else self._softmax)(q, k, v, context, layer)
        return self.proj(self.norm(x.transpose(1, 2).flatten(2)))

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, context: Context, layer: tuple[Tensor, ...]) -> Tensor:
        if layer:
            return self._cached(q, k, v, context, *layer)
        repeat = partial(torch.repeat_interleave, repeats=self.heads // self.groups, dim=1)

        def encode(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            q, k = self.encoding(q, k, positions=context.positions)
            return q, repeat(k)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return softmax_attention(q, k, repeat(v), scale=self.head_dim**-0.5, is_causal=True)

        return attend(*encode(q, k), v) if self.keep_encoded else attend_encoded(encode, attend, q, k, v)

    def _cached(self, q: Tensor, k: Tensor, v: Tensor, context: Context, keys: Tensor, values: Tensor) -> Tensor:
        values.index_copy_(2, context.rows, v.to(values.dtype))
        if not isinstance(self.encoding, Activation) and k.dtype == keys.dtype and not torch.is_grad_enabled():
            q, _ = self.encoding(q, k, positions=context.positions, out=(None, keys), out_start=context.start)
        else:
            q, k = self.encoding(q, k, positions=context.positions)
            keys.index_copy_(2, context.rows, k.to(keys.dtype))
        # Query heads that share a key head are stacked along the tokens, so the cache is not repeated for each of
        # them.
        q = q.unflatten(1, (self.groups, -1)).flatten(2, 3).to(keys.dtype)
        x = softmax_attention(q, keys, values, scale=self.head_dim**-0.5, attn_mask=context.mask)
        return x.unflatten(2, (self.heads // self.groups, -1)).flatten(1, 2)

    def _linear(self, q: Tensor, k: Tensor, v: Tensor, context: Context, layer: tuple[Tensor, ...]) -> Tensor:
        attend = partial(
            attend_with, self.encoding, q, k, v, context.positions, normalizer="none", is_causal=True,
            decay=None if self.decay is None else self.decay(),
        )  # fmt: skip
        if not layer:
            return attend()
        (state,) = layer
        out, (after, _) = attend(gate=context.gate, state=(state,), return_state=True)
        state.copy_(after)
        return out


class Block(nn.Module):
    def __init__(self, config: LmConfig, encoding: nn.Module | None, index: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.dim, eps=1e-6), nn.RMSNorm(config.dim, eps=1e-6)
        self.attn = LmAttention(config, encoding, index)
        self.mlp = SwiGLU(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor, context: Context, layer: tuple[Tensor, ...] = ()) -> Tensor:
        x = x + self.attn(self.norm1(x), context, layer)
        return x + self.mlp(self.norm2(x))


# --- the model -------------------------------------------------------------------------------------------------------


@dataclass
class Cache:
    """Decoding state on the device, which each call updates in place.

    Args:
        length: number of tokens in the cache, a scalar int64 tensor.
        padding: number of padding tokens at the start of each sample, an int64 tensor (B,).
        layers: encoded keys (B, G, L, E) and values (B, G, L, D) of each layer, or a state (B, G, E, D) with linear
            attention.
        max_length: L. Exceeding this length raises an IndexError on a CPU, and a device error on a GPU. Without softmax
            attention, there is no limit.
    """

    length: Tensor
    padding: Tensor
    layers: list[tuple[Tensor, ...]]
    max_length: int

    def reset(self) -> None:
        for tensor in (self.length, *(t for layer in self.layers for t in layer)):
            tensor.zero_()


def check_tokens(name: str, tokens: Tensor, batch: int | None = None) -> None:
    """Check that tokens are integers (B, N) with N > 0, and with B = ``batch`` unless ``batch`` is None."""
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"{name}: expected an integer tensor of shape (B, N), got {type(tokens).__name__}. To encode a string as "
            "bytes, pass torch.tensor([list(text.encode())])"
        )
    whole = tokens.dtype in (torch.int32, torch.int64)
    if not whole or tokens.ndim != 2 or tokens.shape[1] < 1 or batch not in (None, tokens.shape[0]):
        form = "(B, N)" if batch is None else f"({batch}, N)"
        raise ValueError(
            f"{name}: expected an integer tensor of shape {form} with N > 0, got {tokens.dtype} {tuple(tokens.shape)}"
        )


def check_room(length: int, number: int, max_length: int) -> None:
    """Check that ``number`` more tokens fit into a cache that already contains ``length`` tokens."""
    if length + number > max_length:
        raise IndexError(
            f"cache: expected at most {max_length - length} more tokens (max_length is {max_length}), got {number}; "
            "create a cache with a larger max_length"
        )


class CausalLm(nn.Module):
    """Causal language model that computes logits (B, N, vocab_size) from tokens (B, N).

    Logits are differentiable with respect to all parameters, including learned frequencies and phases. The logits have
    the dtype of the weights, or the autocast dtype. Frequencies stay float32 if you cast the model to a different
    dtype.
    """

    def __init__(self, config: LmConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        layers = build_layers(config)
        self.blocks = nn.ModuleList(Block(config, layers[i], i) for i in range(config.depth))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights as in GPT-2, with N(0, 0.02²), and scale residual output layers by 1/√(2 depth)."""
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "fc2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.depth))
            elif name.endswith(("qkv.weight", "fc1_g.weight", "fc1_x.weight", "embed.weight")):
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Compute logits. If you pass a cache, add the tokens to it.

        With a cache, the tokens continue the sequence in the cache. To decode a single step, pass tokens (B, 1).

        Raises:
            ValueError: for invalid tokens or an incompatible cache. On a GPU, the cache's length is not checked.
            IndexError: if, on a CPU, a cache with softmax attention has no room for the tokens.
        """
        if cache is not None:
            self._check_cache(tokens, cache)
        context = Context(Grid((tokens.shape[1],))) if cache is None else self._context(tokens, cache)
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, context) if cache is None else block(x, context, cache.layers[i])
        if cache is not None:
            cache.length.add_(tokens.shape[1])
        return F.linear(self.norm(x), self.embed.weight)

    def _check_cache(self, tokens: Tensor, cache: Cache) -> None:
        check_tokens("tokens", tokens, len(cache.padding))
        if len(cache.layers) != self.config.depth:
            raise ValueError(
                f"cache: expected a cache with {self.config.depth} layers, like this model, got {len(cache.layers)}"
            )
        if "softmax" in self.config.kinds and can_read(cache.length):
            check_room(int(cache.length), tokens.shape[1], cache.max_length)

    def _context(self, tokens: Tensor, cache: Cache) -> Context:
        rows = cache.length + torch.arange(tokens.shape[1], device=tokens.device)
        positions = (rows - cache.padding[:, None])[..., None]
        gate = positions[..., 0][:, None] >= 0 if "linear" in self.config.kinds else None
        if "softmax" not in self.config.kinds:
            return Context(positions, rows, gate=gate)
        columns = torch.arange(cache.max_length, device=tokens.device)
        rows_ = rows[:, None]
        # Padding attends to itself, because a row that attends to no key would be NaN.
        mask = (columns <= rows_) & ((columns >= cache.padding[:, None, None]) | (columns == rows_))
        repeated = mask[:, None].expand(-1, self.config.num_heads // self.config.num_kv_heads, -1, -1)
        return Context(positions, rows, cache.length, repeated.flatten(1, 2)[:, None], gate)

    def new_cache(self, batch: int, max_length: int, padding: Tensor | None = None) -> Cache:
        """Create an empty cache for ``max_length`` tokens, including the padding (B,) from :func:`left_pad`."""
        check_at_least(1, batch=batch, max_length=max_length)
        c, weight = self.config, self.embed.weight
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        forms: dict[str, tuple[list[tuple[int, int]], torch.dtype]] = {  # shapes and dtype of a layer's cache
            "linear": ([(c.key_dim, c.head_dim)], torch.promote_types(dtype, torch.float32)),
            "softmax": ([(max_length, c.key_dim), (max_length, c.head_dim)], dtype),
        }
        layers = [
            tuple(torch.zeros(batch, c.num_kv_heads, *s, dtype=dtype, device=weight.device) for s in shapes)
            for shapes, dtype in (forms[kind] for kind in c.kinds)
        ]
        padded = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        if padding is not None:
            if tuple(padding.shape) != (batch,) or padding.is_floating_point():
                raise ValueError(
                    f"padding: expected an integer tensor of shape ({batch},), got {padding.dtype} "
                    f"{tuple(padding.shape)}"
                )
            padded.copy_(padding)
        return Cache(padded.new_zeros(()), padded, layers, max_length)

    def rescale(self, scaling: Scaling | None) -> None:
        """Rescale the frequencies of all layers in place. None restores the trained frequencies.

        For example, call ``model.rescale(partial(yarn_scaling, factor=4, original_length=512))``. Cached keys keep
        their old encoding, so create a new cache afterwards.
        """
        if self.config.encoding != "none":
            set_scaling(self, scaling)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: frequencies, phases and decays."""
        return self.encoding.no_weight_decay(self)

    @property
    def encoding(self) -> EncodingStack:
        """Encodings of all layers. Each encoding is a submodule of its layer's attention module."""
        blocks: Any = self.blocks
        return EncodingStack([block.attn.encoding for block in blocks])
