"""Rotary functions with the interfaces of other code bases, written from their formulas, and example calls.

The tensors are small, with different numbers of samples, heads and tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

B, H, K, N, D = 2, 4, 2, 6, 32


def quarter_turn(x: Tensor) -> Tensor:
    """Map (a, b) → (-b, a) in the half layout."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def quarter_turn_pairs(x: Tensor) -> Tensor:
    """Map (a, b) → (-b, a) in the interleaved layout."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((-b, a), -1).flatten(-2)


# --- functions of language models ---------------------------------------------------------------------------------


def hf_llama(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + quarter_turn(q) * sin, k * cos + quarter_turn(k) * sin


def hf_vision(q, k, cos, sin):
    """Rotate packed images (N, H, D), as in Qwen-VL's vision tower."""
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    return tuple((x.float() * cos + quarter_turn(x.float()) * sin).to(x.dtype) for x in (q, k))


def hf_partial(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate with tables narrower than a head, as in Phi, GPT-NeoX and StableLM."""
    width = cos.shape[-1]
    turned = hf_llama(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((t, x[..., width:]), -1) for t, x in zip(turned, (q, k), strict=True))


def hf_interleaved(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate neighbouring channels with tables in the half layout, as in GLM, Cohere and ERNIE."""
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    dtype = q.dtype
    turned = [x.float() * cos + quarter_turn_pairs(x.float()) * sin for x in (q, k)]
    return tuple(t.to(dtype) for t in turned)


def hf_sections(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """Rotate with cos and sin (3, B, N, D), using one axis per section of the channels, as in Qwen2-VL."""
    widths = list(mrope_section) * 2
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(t.split(widths, -1))], -1).unsqueeze(unsqueeze_dim)
        for t in (cos, sin)
    )
    return q * cos + quarter_turn(q) * sin, k * cos + quarter_turn(k) * sin


def deepseek(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """Rotate neighbouring channels, and return the result in the half layout, as in DeepSeek."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(unsqueeze_dim), sin[..., :half].unsqueeze(unsqueeze_dim)
    out = []
    for x in (q, k):
        a, b = x[..., 0::2], x[..., 1::2]
        out.append(torch.cat((a * cos - b * sin, a * sin + b * cos), -1))
    return tuple(out)


def with_position_ids(q, k, cos, sin, position_ids):
    """Rotate with rows of (L, D) tables selected by position, as in old versions of transformers."""
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return q * cos + quarter_turn(q) * sin, k * cos + quarter_turn(k) * sin


def meta_llama(xq, xk, freqs_cis):
    """Multiply pairs of x (B, N, H, D) by complex numbers (N, D/2), as in Meta's code."""
    turned = []
    for x in (xq, xk):
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        shape = [n if i in (1, z.ndim - 1) else 1 for i, n in enumerate(z.shape)]
        turned.append(torch.view_as_real(z * freqs_cis.view(shape)).flatten(3).type_as(x))
    return tuple(turned)


def torchtitan_cos_sin(xq, xk, rope_cache, positions=None):
    """Rotate with a single table (L, 2D) of cosines and sines, using its first rows or the rows at ``positions``."""
    rows = rope_cache[: xq.shape[1]][None] if positions is None else rope_cache[positions]
    cos, sin = rows.unsqueeze(2).chunk(2, -1)
    return tuple((x.float() * cos + quarter_turn(x.float()) * sin).type_as(x) for x in (xq, xk))


def flash_attn(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """Rotate with rows of cos and sin (L, R/2) from ``seqlen_offsets`` on, as in flash-attn."""
    if cu_seqlens is not None or max_seqlen is not None or isinstance(seqlen_offsets, Tensor):
        raise NotImplementedError
    width, tokens = 2 * cos.shape[-1], x.shape[1]
    cos, sin = (t[seqlen_offsets : seqlen_offsets + tokens] for t in (cos, sin))
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1)[:, None], sin.repeat_interleave(2, -1)[:, None]
    else:
        cos, sin = cos.repeat(1, 2)[:, None], sin.repeat(1, 2)[:, None]
    part = x[..., :width].float()
    part = part * cos + (quarter_turn_pairs if interleaved else quarter_turn)(part) * sin
    out = torch.cat((part.to(x.dtype), x[..., width:]), -1)
    return x.copy_(out) if inplace else out


def chatglm(x, rope_cache):
    """Rotate a quarter of the channels of x (N, B, H, D) with rope_cache (N, B, R/2, 2), as in ChatGLM."""
    width = 2 * rope_cache.shape[-2]
    part = x[..., :width].unflatten(-1, (-1, 2))
    cache = rope_cache[: x.shape[0]].unsqueeze(2)
    a, b = part.unbind(-1)
    cos, sin = cache.unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((turned, x[..., width:]), -1)


def megatron(t, freqs):
    """Rotate x (N, B, H, D) by angles (N, 1, 1, R), as in Megatron."""
    width = freqs.shape[-1]
    part = t[..., :width]
    part = part * freqs.cos().to(t.dtype) + quarter_turn(part) * freqs.sin().to(t.dtype)
    return torch.cat((part, t[..., width:]), -1)


def rotary_embedding_torch(freqs, t, start_index=0, scale=1.0, seq_dim=-2):
    """Rotate a part of the channels by the last rows of angles (N, R), as in rotary-embedding-torch."""
    freqs = freqs[-t.shape[seq_dim] :]
    stop = start_index + freqs.shape[-1]
    left, part, right = t[..., :start_index], t[..., start_index:stop], t[..., stop:]
    part = part * freqs.cos() * scale + quarter_turn_pairs(part) * freqs.sin() * scale
    return torch.cat((left, part, right), -1).type(t.dtype)


# --- functions of vision and video models ---------------------------------------------------------------------------


def flux(xq, xk, freqs_cis):
    """Multiply pairs by 2 × 2 matrices (B, 1, N, D/2, 2, 2), as in FLUX."""
    turned = []
    for x in (xq, xk):
        pairs = x.float().unflatten(-1, (-1, 1, 2))
        y = freqs_cis[..., 0] * pairs[..., 0] + freqs_cis[..., 1] * pairs[..., 1]
        turned.append(y.reshape(x.shape).type_as(x))
    return tuple(turned)


def diffusers_function(x, freqs_cis, use_real=True, use_real_unbind_dim=-1, sequence_dim=2):
    if use_real:
        cos, sin = (t[None, None] if sequence_dim == 2 else t[None, :, None] for t in freqs_cis)
        turn = quarter_turn_pairs if use_real_unbind_dim == -1 else quarter_turn
        return (x.float() * cos + turn(x).float() * sin).to(x.dtype)
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * freqs_cis.unsqueeze(2)).flatten(3).type_as(x)


def wan_halves(hidden_states, freqs_cos, freqs_sin):
    """Rotate with every other entry of full-width tables, as in diffusers' Wan."""
    a, b = hidden_states.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
    out = torch.empty_like(hidden_states)
    out[..., 0::2], out[..., 1::2] = a * cos - b * sin, a * sin + b * cos
    return out.type_as(hidden_states)


def ltx(x, freqs):
    """Rotate the channels of all heads together, with tables of the same width, as in LTX."""
    cos, sin = freqs
    return (x.float() * cos + quarter_turn_pairs(x).float() * sin).to(x.dtype)


def split_heads(x, freqs):
    """Rotate x (B, N, H·D) with tables (B, H, N, D/2), as in LTX-2."""
    cos, sin = freqs
    heads = x.unflatten(-1, (cos.shape[1], -1)).transpose(1, 2).float()
    a, b = heads.chunk(2, -1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return turned.transpose(1, 2).flatten(2).to(x.dtype)


def repeated_over_heads(x, rope):
    """Rotate x (B, N, H·D) with tables (2, N, D) that all heads share, as in wav2vec 2.0."""
    heads = x.unflatten(-1, (-1, rope.shape[-1]))
    cos, sin = rope[0][:, None], rope[1][:, None]
    return (heads * cos + quarter_turn(heads) * sin).flatten(-2)


def dinov3(x, sin, cos):
    return x * cos + quarter_turn(x) * sin


def dinov3_with_prefix(q, k, rope):
    """Rotate patches in the table's dtype, but not the class and register tokens before them, as in DINOv3."""
    sin, cos = rope
    out = []
    for x in (q, k):
        prefix = x.shape[-2] - sin.shape[-2]
        patches = x.to(sin.dtype)[..., prefix:, :]
        patches = patches * cos + quarter_turn(patches) * sin
        out.append(torch.cat((x[..., :prefix, :].to(sin.dtype), patches), -2).to(x.dtype))
    return tuple(out)


def timm_concatenated(x, emb, half=False):
    sin, cos = emb.chunk(2, -1)
    return (x * cos + (quarter_turn if half else quarter_turn_pairs)(x) * sin).to(x.dtype)


def blocks_by_axis(x, cos, sin, ndim=2):
    """Rotate the channels of each axis in the half layout, as in Gemma's vision tower."""
    width = x.shape[-1] // ndim
    parts = zip(*(t.split(width, -1) for t in (x, cos, sin)), strict=True)
    return torch.cat([a * c.unsqueeze(2) + quarter_turn(a) * s.unsqueeze(2) for a, c, s in parts], -1)


def minus_sine(x, cos, sin):
    """Rotate x (B, N, H, D) in the opposite direction with tables (L, D/2), as in modded-nanogpt."""
    cos, sin = cos[None, : x.shape[1], None], sin[None, : x.shape[1], None]
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).type_as(x)


def wan(x, grid_sizes, freqs):
    """Rotate x (B, L, H, D), whose first tokens are a separate grid per sample, as in Wan 2.1."""
    c = x.shape[3] // 2
    parts = freqs.split([c - 2 * (c // 3), c // 3, c // 3], dim=1)
    out = []
    for i, (f, h, w) in enumerate(grid_sizes.tolist()):
        table = torch.cat([
            parts[0][:f].view(f, 1, 1, -1).expand(f, h, w, -1), parts[1][:h].view(1, h, 1, -1).expand(f, h, w, -1),
            parts[2][:w].view(1, 1, w, -1).expand(f, h, w, -1),
        ], -1).reshape(f * h * w, 1, -1)  # fmt: skip
        z = torch.view_as_complex(x[i, : f * h * w].double().unflatten(-1, (-1, 2)))
        out.append(torch.cat((torch.view_as_real(z * table).flatten(2), x[i, f * h * w :])))
    return torch.stack(out).float()


# --- classes -----------------------------------------------------------------------------------------------------


class TorchtuneRotary(nn.Module):
    """Module that rotates x (B, N, H, D) with the rows of a cache (L, D/2, 2) that ``positions`` select."""

    cache: Tensor

    def __init__(self, dim: int = D, max_seq_len: int = 40) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_seq_len).float(), 100.0 ** -(torch.arange(0, dim, 2) / dim))
        self.register_buffer("theta", 100.0 ** -(torch.arange(0, dim, 2) / dim), persistent=False)
        self.register_buffer("cache", torch.stack((angles.cos(), angles.sin()), -1), persistent=False)

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        rows = self.cache[: x.shape[1]] if input_pos is None else self.cache[input_pos]
        rows = rows.view(-1, x.shape[1], 1, x.shape[3] // 2, 2)
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = rows.unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(3).type_as(x)


class LightningRotary(nn.Module):
    """Module that rotates image tokens (B, H, N, D) with tables in buffers, as in LightningDiT and EVA."""

    freqs_cos: Tensor
    freqs_sin: Tensor

    def __init__(self, dim: int = D, side: int = 3) -> None:
        super().__init__()
        omega = 100.0 ** -(torch.arange(0, dim // 2, 2) / (dim // 2))
        line = torch.outer(torch.arange(side).float(), omega).repeat_interleave(2, -1)
        angles = torch.cat((line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)), -1).flatten(0, 1)
        self.register_buffer("freqs_cos", angles.cos())
        self.register_buffer("freqs_sin", angles.sin())

    def forward(self, t: Tensor) -> Tensor:
        return t * self.freqs_cos + quarter_turn_pairs(t) * self.freqs_sin


class EvaRotary(LightningRotary):
    """Variant that also accepts the indices of the patches to keep."""

    def forward(self, t: Tensor, patch_indices_keep: Tensor | None = None) -> Tensor:
        if patch_indices_keep is None:
            return super().forward(t)
        cos, sin = self.freqs_cos[patch_indices_keep].unsqueeze(1), self.freqs_sin[patch_indices_keep].unsqueeze(1)
        return t * cos + quarter_turn_pairs(t) * sin


class Attention(nn.Module):
    """Attention with a method that rotates patches, but not the tokens before them, as in DINOv3."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D)

    def apply_rope(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return dinov3_with_prefix(q, k, rope)


# --- calls -------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def calls() -> dict[str, Call]:
    """Return an example call of each function, by name."""
    torch.manual_seed(0)
    q, k, qt, kt = randn(B, H, N, D), randn(B, K, N, D), randn(B, N, H, D), randn(B, N, K, D)
    cos, sin = randn(B, N, D), randn(B, N, D)
    flat, flat_sin, half, half_sin = randn(N, D), randn(N, D), randn(N, D // 2), randn(N, D // 2)
    long, long_sin = randn(2 * N, D // 2), randn(2 * N, D // 2)
    cis = randn(N, D // 2, dtype=torch.complex64)
    ids = torch.tensor([[0, 3, 1, 1, 7, 2], [5, 4, 3, 2, 1, 0]])
    grids = torch.tensor([[1, 2, 2], [2, 1, 3]])
    image, image_all = randn(B, H, 9, D), randn(B, H, 11, D)
    found: dict[str, tuple[Any, ...]] = {
        "hf_llama": (hf_llama, (q, k, cos, sin)),
        "hf_llama, tokens first": (hf_llama, (qt, kt, cos, sin), {"unsqueeze_dim": 2}),
        "hf_llama, one table": (hf_llama, (q, k, cos[:1], sin[:1])),
        "hf_llama, one token": (hf_llama, (q[:, :, :1], k[:, :, :1], cos[:, :1], sin[:, :1])),
        "hf_vision": (hf_vision, (q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])),
        "hf_partial": (hf_partial, (q, k, cos[..., :16], sin[..., :16])),
        "hf_interleaved": (hf_interleaved, (q, k, cos, sin)),
        "hf_sections": (hf_sections, (q, k, randn(3, B, N, D), randn(3, B, N, D), [4, 6, 6])),
        "deepseek": (deepseek, (q, k, cos, sin)),
        "with_position_ids": (with_position_ids, (q, k, randn(9, D), randn(9, D), ids)),
        "meta_llama": (meta_llama, (qt, kt, cis)),
        "torchtitan": (torchtitan_cos_sin, (qt, kt, randn(2 * N, 2 * D))),
        "torchtitan, positions": (torchtitan_cos_sin, (qt, kt, randn(2 * N, 2 * D), ids)),
        "flash_attn": (flash_attn, (qt, half, half_sin)),
        "flash_attn, interleaved": (flash_attn, (qt, half, half_sin, True)),
        "flash_attn, partial": (flash_attn, (qt, half[:, :8], half_sin[:, :8])),
        "flash_attn, offset": (flash_attn, (qt, long, long_sin), {"seqlen_offsets": 3}),
        "chatglm": (chatglm, (randn(N, B, H, D), randn(N, B, 4, 2))),
        "megatron": (megatron, (randn(N, B, H, D), randn(N, 1, 1, 16))),
        "rotary_embedding_torch": (rotary_embedding_torch, (flat, q)),
        "rotary_embedding_torch, slice": (rotary_embedding_torch, (flat[:, :16], q), {"start_index": 8}),
        "rotary_embedding_torch, longer": (rotary_embedding_torch, (randn(N + 3, D), q)),
        "flux": (flux, (q, randn(B, H, N, D), randn(1, 1, N, D // 2, 2, 2))),
        "diffusers": (diffusers_function, (q, (flat, flat_sin))),
        "diffusers, halves": (diffusers_function, (q, (flat, flat_sin)), {"use_real_unbind_dim": -2}),
        "diffusers, tokens first": (diffusers_function, (qt, (flat, flat_sin)), {"sequence_dim": 1}),
        "diffusers, complex": (diffusers_function, (qt, cis[None], False)),
        "wan_halves": (wan_halves, (qt, randn(1, N, 1, D), randn(1, N, 1, D))),
        "ltx": (ltx, (randn(B, N, H * D), (randn(B, N, H * D), randn(B, N, H * D)))),
        "split_heads": (split_heads, (randn(B, N, H * D), (randn(B, H, N, D // 2), randn(B, H, N, D // 2)))),
        "repeated_over_heads": (repeated_over_heads, (randn(B, N, H * D), randn(2, N, D))),
        "dinov3": (dinov3, (q, flat_sin, flat)),
        "dinov3, unbatched": (dinov3, (q[0], flat_sin, flat)),
        "dinov3, one head": (dinov3, (q[:, 0], flat_sin, flat)),
        "dinov3, heads differ": (dinov3, (q, randn(H, N, D), randn(H, N, D))),
        "dinov3 with prefix": (dinov3_with_prefix, (image_all, randn(B, H, 11, D), (randn(9, D), randn(9, D)))),
        "timm": (timm_concatenated, (q, randn(N, 2 * D))),
        "timm, half": (timm_concatenated, (q, randn(N, 2 * D)), {"half": True}),
        "timm, heads differ": (timm_concatenated, (q, randn(H, N, 2 * D))),
        "timm, samples differ": (timm_concatenated, (q, randn(B, 1, N, 2 * D))),
        "blocks_by_axis": (blocks_by_axis, (qt, cos, sin)),
        "minus_sine": (minus_sine, (qt, long, long_sin)),
        "wan": (wan, (randn(B, 8, H, D), grids, randn(16, D // 2, dtype=torch.complex64))),
        "torchtune": (TorchtuneRotary(), (qt,)),
        "torchtune, positions": (TorchtuneRotary(), (qt,), {"input_pos": ids}),
        "lightning": (LightningRotary(), (image,)),
        "eva": (EvaRotary(), (image,)),
        "eva, kept": (EvaRotary(), (q, ids)),
        "attention method": (Attention().apply_rope, (image_all, randn(B, H, 11, D), (randn(9, D), randn(9, D)))),
        "partial": (functools.partial(hf_llama, unsqueeze_dim=2), (qt, kt, cos, sin)),
    }
    return {name: Call(c[0], c[1], dict(*c[2:])) for name, c in found.items()}
