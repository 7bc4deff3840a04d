"""Softmax and linear attention for backbones, and the context that a backbone passes to its attention layers.

Shapes: B batch, N tokens, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..checks import join_names
from ..engine.inductor.private import is_exporting, is_transforming
from ..modules.linear import Memory, attend_with
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from .encoding import Activation

__all__ = [
    "ATTENTIONS", "AttentionKind", "Carried", "Context", "attend_encoded", "attend_linearly", "attend_softmax",
    "check_causal", "check_key_norm", "check_memory", "sdpa_backends", "softmax_attention", "weight_dtype",
]  # fmt: skip

AttentionKind: TypeAlias = Literal["softmax", "linear"]
ATTENTIONS: tuple[AttentionKind, ...] = ("softmax", "linear")

torch.fx.wrap("softmax_attention")  # a single node in traced graphs


NOTHING = Activation()


class Context:
    """Inputs that a backbone's forward method passes to each attention layer through the ``attn_mask`` argument.

    The class is not a tuple, because mixed precision in FSDP and DDP would cast the tensors in a tuple, including
    positions.

    Args:
        block: number of tokens per frame, for a memory or if a frame only attends to itself and to earlier frames.
        window: number of frames in the window of softmax attention, including the current one. None means all frames.
        bidirectional: whether a frame attends to all frames. If so, only linear layers with a memory use ``block``.
    """

    def __init__(
        self,
        encoding: nn.Module | None,
        positions: Grid | Coordinates | None,
        attn_mask: Tensor | None = None,
        *,
        block: int | None = None,
        carried: Carried | None = None,
        window: int | None = None,
        bidirectional: bool = False,
    ) -> None:
        self.encoding, self.positions, self.attn_mask = encoding, positions, attn_mask
        self.block, self.carried, self.window, self.bidirectional = block, carried, window, bidirectional

    def block_for(self, memory: Memory | None) -> int | None:
        """Return the number of tokens per block in a layer with this memory, or None if its tokens have no order."""
        return None if self.bidirectional and memory is None else self.block


def weight_dtype(layer: nn.Module, default: torch.dtype) -> torch.dtype:
    """Return the dtype of a layer's weight, or ``default`` if the weight is quantised."""
    weight: Any = getattr(layer, "weight", None)  # a method in torch.ao's quantised layers
    if weight is None:  # a wrapper, such as LoRA
        weight = next(layer.parameters(), None)
    return weight.dtype if isinstance(weight, Tensor) and weight.is_floating_point() else default


def sdpa_backends(q: Tensor, v: Tensor) -> list[SDPBackend] | None:
    """Return the SDPA backends to try, in order, or None for PyTorch's default.

    Flash attention rejects the cosine map, which makes q wider than v. PyTorch then falls back to the memory-efficient
    kernel, but on Hopper, cuDNN is several times faster in 16 bits (docs/tuning.md). Function transforms and forward
    mode require the math backend, because the fused backends have no forward-mode derivative.
    """
    if is_transforming():
        return [SDPBackend.MATH]
    if q.shape[-1] == v.shape[-1] or not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return None
    if torch.version.hip or torch.cuda.get_device_capability(q.device)[0] < 9:
        return None
    return [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute SDPA of q, k (B, H, N, D or 2D) and v (B, H, N, D) with the backends of :func:`sdpa_backends`.

    ``scale`` is D**-0.5, where D is the head_dim before any map, so a map with zero frequencies has no effect.
    """
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(q.dtype)  # mixed precision casts q, but not the contents of a Context
    backends = sdpa_backends(q, v)
    with nullcontext() if backends is None else sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=bool(is_causal), scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip # is_causal is a tensor in ONNX's older exporter


def attend_softmax(attn: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Compute softmax attention of q, k, v (B, H, N, ...) with a timm attention's settings (fused, dropout)."""
    if attn.fused_attn:
        dropout_p = attn.attn_drop.p if attn.training else 0.0
        return softmax_attention(
            q, k, v, scale=attn.scale, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p
        )
    # This branch runs after timm.layers.set_fused_attn(False), for export or for hooks on the attention weights.
    from timm.layers.attention import maybe_add_mask, resolve_self_attn_mask

    weights = (q * attn.scale) @ k.transpose(-2, -1)
    weights = maybe_add_mask(weights, resolve_self_attn_mask(q.shape[-2], weights, attn_mask, is_causal))
    return attn.attn_drop(weights.softmax(dim=-1)) @ v


def attend_encoded(
    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Compute ``attend(*encode(q, k), v)``, and re-encode q and k in the backward pass to save memory.

    Only the encoding runs twice, so the gradients are identical. ``encode`` must not draw random numbers. Under
    function transforms, without gradients, or with other saved-tensor hooks (activation checkpointing), ``encode`` only
    runs once.
    """
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if torch.compiler.is_compiling() and needed and not is_exporting():
        contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
        return checkpoint(_attend_plain, encode, attend, q, k, v, use_reentrant=False, context_fn=contexts)
    if (
        not needed
        or torch.compiler.is_compiling()
        or is_transforming()
        or torch._C._is_tracing()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore[reportAttributeAccessIssue]
    ):
        return _attend_plain(encode, attend, q, k, v)
    encoded = encode(q, k)
    again = _Again(encode, (q, k), encoded)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        return attend(*encoded, v)


def _attend_plain(encode: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(*encode(q, k), v)


class _Again:
    """Replacement for the encoded tensors that autograd would save for the backward pass."""

    def __init__(self, encode: Any, xs: tuple[Tensor, ...], encoded: tuple[Tensor, ...]) -> None:
        self.encode, self.xs = encode, tuple(x.detach() for x in xs)
        self.versions = [x._version for x in self.xs]
        of_inputs = {x.untyped_storage()._cdata for x in xs}
        storages = enumerate(y.untyped_storage()._cdata for y in encoded)
        self.indices = {storage: i for i, storage in storages if storage not in of_inputs}
        kind = xs[0].device.type
        self.autocast: Any = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        self.made: dict[int, Tensor] = {}  # recomputed tensors that have not been unpacked yet

    def pack(self, t: Tensor) -> Any:
        storage = t.untyped_storage()._cdata
        if storage not in self.indices:
            return t
        return self.indices[storage], t.size(), t.stride(), t.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        which, size, stride, offset = kept
        if which not in self.made:
            if [x._version for x in self.xs] != self.versions:
                raise RuntimeError(
                    "q, k: modified in place since the forward pass, but the backward pass needs to re-encode them"
                )
            with torch.no_grad(), torch.autocast(self.xs[0].device.type, **self.autocast):
                self.made = dict(enumerate(self.encode(*self.xs)))
        return self.made.pop(which).as_strided(size, stride, offset)


_KEPT = ("bmm", "mm", "baddbmm", "_softmax", "native_dropout", "rand_like", "bernoulli")


def _keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of attention operators, and recompute everything else (that is, the encoding)."""
    name = op._schema.name.removeprefix("aten::") if isinstance(op, torch._ops.OpOverload) else ""
    kept = name in _KEPT or name.startswith("_scaled_dot_product") or not name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE


class Carried:
    """State passed from one chunk of a sequence to the next: sums, or keys and values, for each attention layer."""

    def __init__(self, before: Sequence[Any] = ()) -> None:
        self.before = tuple(before)
        self.after: list[Any] = []

    def take(self) -> Any:
        return self.before[len(self.after)] if self.before else None


def attend_linearly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: nn.Module | None,
    positions: Grid | Coordinates | None,
    *,
    attn_mask: Tensor | None = None,
    gate: Tensor | None = None,
    is_causal: bool = False,
    block: int | None = None,
    carried: Carried | None = None,
    memory: Memory | None = None,
    **options: Any,
) -> Tensor:
    """Compute linear attention of unencoded q, k and v (B, H, N, D) in v's dtype.

    ``options`` are the arguments normalizer, decay, norm and act of :func:`attend_with`.
    """
    if attn_mask is not None:
        raise ValueError(
            f"attn_mask: expected None with linear attention, got a mask of shape {tuple(attn_mask.shape)}. Linear "
            "attention has no weights to mask; use is_causal, or attention='softmax'"
        )
    q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, norms return float32
    if memory is not None:
        options |= {"rule": memory.rule, "directions": memory.directions}
        if memory.rule == "delta":
            assert block is not None
            gate = _scale_keys(k, block, 0 if positions is None else positions.prefix, gate)
    if carried is not None:
        options |= {"state": carried.take(), "return_state": True}
    own, is_causal = NOTHING if encoding is None else encoding, bool(is_causal)  # a tensor in ONNX's older exporter
    found: Any = attend_with(own, q, k, v, positions, gate=gate, block=block, is_causal=is_causal, **options)
    if carried is None:
        return found
    o, after = found
    carried.after.append(after)
    return o


def _scale_keys(k: Tensor, block: int, prefix: int, gate: Tensor | None) -> Tensor:
    """Return the delta-rule gate (B, H or 1, N) for keys (B, H, N, D) that were normalised within each head.

    With this gate, the squared norms of a frame's or prefix's keys (each about D) sum to at most about 1, so the state
    can't grow from frame to frame. SANA-WM multiplies the keys by the square root of this gate instead.
    """
    width = k.shape[3] * max(block, prefix)
    scale = k.new_full((k.shape[0], 1, k.shape[2]), 1 / width, dtype=torch.float32)
    return scale if gate is None else scale * gate


def check_memory(memory: Any, kinds: Sequence[str]) -> None:
    """Check that ``memory`` is a Memory, and that the model has linear attention."""
    if memory is None:
        return
    if not isinstance(memory, Memory):
        raise TypeError(
            f"memory: expected an lrpe_md.Memory or None, got {type(memory).__name__}; pass Memory(rule=..., decay=...)"
        )
    if "linear" not in kinds:
        raise ValueError(f"memory: expected None without linear attention, got {memory}; use attention='linear'")


def check_key_norm(memory: Memory, qk_norm: Any, known: Sequence[Any]) -> None:
    """If the memory follows the delta rule, check that ``qk_norm`` is a known value that normalises the keys."""
    if memory.rule == "delta" and qk_norm not in known:
        expected = join_names(map(repr, known), "or")
        raise ValueError(
            f"qk_norm: expected {expected} with rule='delta', got {qk_norm!r}. If keys are not normalised, the state "
            f"can grow without bound; build the model with qk_norm={known[0]!r}"
        )


def check_causal(encoding: nn.Module | None) -> None:
    if getattr(encoding, "dim", None) == -2:
        raise ValueError("is_causal: a softmax over the sequence (dim=-2) lets tokens see later tokens; use dim=-1")
