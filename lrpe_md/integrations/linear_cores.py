"""Replace the linear attention of SANA-Video, and SANA-WM's gated delta rule over frames.

If a function has the right parameters, we call it with small random tensors. The function's result and gradients must
match those of :func:`lrpe_md.linear_attention`. As with all rotary functions, the model computes its own cos and sin,
so q and k are rotated first. These models do not rotate the normaliser, so we compute it as a separate sum.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..engine.core.call import Act, Impl
from ..engine.linear.plan import fits_kernels
from ..functional import rotate
from ..functional_linear import linear_attention
from .probing import quietly

__all__ = ["find_core", "replace_core"]

_TOLERANCE = 1e-5  # for a result and its gradients, relative to the largest entry
_LEAST_DECAY = torch.finfo(torch.float32).tiny  # replaces decays that underflow to 0, which linear_attention rejects


class Core(NamedTuple):
    """Our implementation of a function, and random arguments for comparing it with the original."""

    run: Callable[..., Any]  # (impl, the function's arguments by name) -> a result, or None if these are unsupported
    draw: Callable[[int, Callable[..., Tensor]], tuple[list[Tensor], list[Any]]]  # leaves with a gradient, arguments


_lookups: dict[FunctionType, list[Any]] = {}  # globals that each function used when it was compared


@functools.cache
def find_core(function: FunctionType) -> Core | None:
    """Return our implementation of another library's function, or None if there is none or the results differ."""
    core = _CORES.get(" ".join(_parameters(function)))
    if core is None:
        return None
    _lookups[function] = _look_up(function)
    return core if quietly(lambda: _agrees(function, core)) else None


def _parameters(function: FunctionType) -> tuple[str, ...]:
    code = inspect.unwrap(function).__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _look_up(function: FunctionType) -> list[Any]:
    inner = inspect.unwrap(function)
    return [inner.__globals__.get(name) for name in inner.__code__.co_names]


@torch.compiler.assume_constant_result
def _is_unchanged(function: FunctionType) -> bool:
    return all(map(operator.is_, _lookups[function], _look_up(function)))


def _agrees(function: FunctionType, core: Core) -> bool:
    try:
        for case in range(2):
            found, right = (_differentiate(call, core, case) for call in (_by_name(core, function, "auto"), function))
            for a, b in zip(right, found, strict=True):
                if a.shape != b.shape or not (a - b).abs().max() <= _TOLERANCE * a.abs().max():
                    return False
    except Exception:  # third-party code may raise anything
        return False
    return True


def _differentiate(call: Callable[..., Any], core: Core, case: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case)
    with torch.enable_grad():
        leaves, args = core.draw(case, lambda *size: torch.rand(size, generator=generator).requires_grad_())
        y = call(*args)
        return [y, *torch.autograd.grad(y, leaves, torch.rand(y.shape, generator=generator))]


@functools.cache
def replace_core(function: FunctionType, plain: Callable[..., Any], impl: Impl) -> Callable[..., Any]:
    """Return a function that runs our linear attention in place of one that :func:`find_core` recognises.

    If the arguments are not supported, or the function's globals have changed, ``plain`` is called instead.
    """
    ours = _by_name(cast(Core, find_core(function)), function, impl)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = ours(*args, **kwargs) if _is_unchanged(function) else None
        return plain(*args, **kwargs) if found is None else found

    return run


def _by_name(core: Core, function: FunctionType, impl: Impl) -> Callable[..., Any]:
    names, run = _parameters(function), core.run
    return lambda *args, **kwargs: run(impl=impl, **dict(zip(names, args, strict=False)), **kwargs)


def _widen(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in one dtype. float16 becomes float32, because sums over all tokens exceed its range."""
    wide = functools.reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
    wide = torch.float32 if wide == torch.float16 else wide
    return q.to(wide), k.to(wide), v.to(wide)


def _attend(q: Tensor, k: Tensor, v: Tensor, tables: Any, eps: float, act: Act, impl: Impl, **memory: Any) -> Tensor:
    """Return q̂ S / (q̄ · Σ + eps), where q̄ = act(q), and q̂ is q̄ after rotation. q, k and v are (B, H, N, D)."""
    sum_up = partial(linear_attention, map=None, normalizer="none", impl=impl, **memory)
    z = sum_up(q, k, v.new_ones(1).expand(*v.shape[:3], 1), act=act)
    if tables is not None:
        q, k = rotate(q, k, tables=tables, pairs="interleaved", act=act, impl=impl)
        act = "none"
    return sum_up(q, k, v, act=act) / (z + eps)


# --- SANA-Video ------------------------------------------------------------------------------------------------------


def _run_processor(
    *, impl: Impl, self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None,
    attention_mask: Any = None, rotary_emb: Any = None,
) -> Tensor | None:  # fmt: skip
    """Compute the attention of a diffusers processor, whose tables are cos and sin (1, N, 1, D)."""
    if encoder_hidden_states is not None or attention_mask is not None or rotary_emb is None:
        return None
    q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    q = q if attn.norm_q is None else attn.norm_q(q)
    k = k if attn.norm_k is None else attn.norm_k(k)
    q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in _widen(q, k, v))
    cos, sin = rotary_emb
    tables = cos[..., 0::2].transpose(1, 2), sin[..., 1::2].transpose(1, 2)
    o = _attend(q, k, v, tables, 1e-15, "relu", impl).transpose(1, 2).flatten(2)
    return attn.to_out[1](attn.to_out[0](o.to(hidden_states.dtype)))


def _draw_processor(case: int, rand: Callable[..., Tensor]) -> tuple[list[Tensor], list[Any]]:
    x, cos, sin, *weights = rand(2, 7, 12), rand(1, 7, 1, 6), rand(1, 7, 1, 6), *[rand(12, 12) for _ in range(4)]
    to_q, to_k, to_v, to_out = (lambda x, w=w: x @ (w - 0.5) for w in weights)
    norms = (None, None) if case else (lambda x: 2 * x, lambda x: x - 0.1)
    attn = SimpleNamespace(
        to_q=to_q, to_k=to_k, to_v=to_v, to_out=[to_out, lambda x: 3 * x], heads=2, norm_q=norms[0], norm_k=norms[1]
    )  # fmt: skip
    return [x, cos, sin, *weights], [SimpleNamespace(), attn, x, None, None, (cos, sin)]


# --- SANA-WM ---------------------------------------------------------------------------------------------------------


def _run_frames(
    *, impl: Impl, self: Any, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, recall_gate: Any,
    num_frames: int, rotary_emb: Tensor | None = None, **masks: Any,
) -> Tensor | None:  # fmt: skip
    """Compute attention over F frames of S tokens, with q, k, v (B, N, H, D), beta (B, H, F, S) and decay (B, H, F).

    The original scales keys by s = (D S)^-½. Instead, we scale beta by s² and eps by s.
    """
    q, k, v = (x.transpose(1, 2) for x in _widen(query, key, value))
    size, is_masked = query.shape[1] // num_frames, any(mask is not None for mask in masks.values())
    fits = size > 1 and fits_kernels(v.shape[3], q.shape[3], q.element_size(), delta=True)  # otherwise no faster
    if is_masked or not fits or beta.ndim != 4 or (rotary_emb is not None and rotary_emb.ndim != 4):
        return None
    scale = (query.shape[3] * size) ** -0.5
    o = _attend(
        q, k, v, rotary_emb, self.eps * scale, "none", impl, gate=beta.flatten(2).float() * scale**2,
        decay=decay.float().clamp_min(_LEAST_DECAY), block=size, rule="delta", directions="both",
    )  # fmt: skip
    return o.transpose(1, 2).flatten(2).to(value.dtype)


def _rotate_columns(*, impl: Impl, hidden_states: Tensor, freqs: Tensor) -> Tensor | None:
    """Rotate x (B, H, D, N) by complex tables (B or 1, H or 1, N, D / 2)."""
    if freqs.ndim != 4 or not freqs.is_complex():
        return None
    return rotate(hidden_states.mT, tables=freqs, pairs="interleaved", impl=impl).mT


def _draw_frames(case: int, rand: Callable[..., Tensor]) -> tuple[list[Tensor], list[Any]]:
    q, k, v, beta, decay, angles = *[rand(2, 15, 2, 6) for _ in range(3)], rand(2, 2, 5, 3), rand(2, 2, 5), rand(15, 3)
    tables = None if case else torch.polar(torch.ones(1, 1, 15, 3), 3 * angles.detach())
    core = SimpleNamespace(eps=0.5 if case else 1e-8, chunk_size=2)
    args = [core, q - 0.1, k - 0.1, v - 0.5, beta, decay, torch.zeros(1), 5, tables, None, None, None]
    return [q, k, v, beta, decay], args


def _draw_columns(case: int, rand: Callable[..., Tensor]) -> tuple[list[Tensor], list[Any]]:
    x, angles = rand(2, 15, 2, 6), rand(1 + case, 1, 15, 3)
    return [x, angles], [x.permute(0, 2, 3, 1), torch.polar(1 + angles, 3 * angles)]


_CORES = {  # keys are the parameter names of a function
    "self attn hidden_states encoder_hidden_states attention_mask rotary_emb": Core(_run_processor, _draw_processor),
    "self query key value beta decay recall_gate num_frames rotary_emb token_valid_mask beta_valid_mask "
    "decay_valid_mask": Core(_run_frames, _draw_frames),
    "hidden_states freqs": Core(_rotate_columns, _draw_columns),
}
