"""Validate the norm of a call, and separate its options from its tensors."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import Tensor

from ...checks import check_dense, show_value, split_pair
from ...norm import Norm, NormName, Over
from ...positions.coordinates import Coordinates
from ...positions.grid import Grid
from ...reference import no_autocast, normalise
from .call import CallerTables, Layout, Spec, Weights
from .memory import accumulator

KINDS, OVER = get_args(NormName), get_args(Over)
_FORMS = {"head": "(D,), (H, D) or (2 or 3, 1 or H, D)", "heads": "(H, D) or (2 or 3, H, D)"}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def take_norm(options: Any, norm: Any, num_tensors: int) -> tuple[Any, Weights]:
    """Check a norm, even for a cached call.

    Return the norm's weights, and the options with the norm's options filled in.
    """
    if not isinstance(norm, Norm):
        is_module = isinstance(norm, torch.nn.Module)
        advice = "Norm(kind, module.weight, eps=module.eps)" if is_module else 'Norm("rms") or Norm("layer")'
        raise TypeError(f"norm: expected an lrpe_md.Norm, got {type(norm).__name__}; pass {advice}")
    kind, weight, bias, eps, over, offset = norm
    if kind not in KINDS:
        advice = "; pass Norm(kind, weight)" if isinstance(kind, Tensor) else ""
        raise ValueError(f"norm.kind: expected one of {KINDS}, got {show_value(kind)}{advice}")
    if over not in OVER:
        raise ValueError(f"norm.over: expected one of {OVER}, got {show_value(over)}")
    for name, number in (("eps", eps), ("offset", offset)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"norm.{name}: expected a number, got {type(number).__name__}")
    if not -math.inf < offset < math.inf:
        raise ValueError(f"norm.offset: expected a finite number, got {offset!r}")
    if not 0 < eps < float("inf"):
        raise ValueError(f"norm.eps: expected a finite positive number, got {eps!r}")
    if bias is not None and kind == "rms":
        raise ValueError("norm.bias: expected None for kind='rms', which has no bias; pass None or use kind='layer'")
    if offset != 0 and weight is None:
        raise ValueError(f"norm.offset: expected 0 without a weight, got {offset!r}; the offset is added to the weight")
    weight, weight_k = _split_weights("weight", weight, num_tensors)
    bias, bias_k = _split_weights("bias", bias, num_tensors)
    options = options._replace(norm=Norm(kind, None, None, float(eps), over, float(offset)))
    return options, Weights(weight, bias, weight_k, bias_k)


def _split_weights(name: str, value: Any, num_tensors: int) -> tuple[Any, ...]:
    """Return γ (or β) for q (or the only tensor) and for k."""
    parts = split_pair(f"norm.{name}", value, num_tensors)
    if type(value) is tuple and any(t is None for t in value):
        raise TypeError(
            f"norm.{name}: expected a tensor for q and one for k, or None for both, got a tuple that contains None"
        )
    return (*parts, None)[:2]


def norm_fields(norm: Norm) -> dict[str, Any]:
    """Return the fields of a :class:`Spec` that describe a norm."""
    return {"norm": norm.kind, "norm_over": norm.over, "norm_eps": norm.eps, "norm_offset": norm.offset}


def of_tensor(weights: Weights, i: int) -> Weights:
    """Return the weights for a call on a single tensor: q if i is 0, and k if i is 1."""
    return Weights(weights.weight_k, weights.bias_k) if i else Weights(weights.weight, weights.bias)


def check_weights(options: Any, weights: Weights, xs: tuple[Tensor, ...], layout: Layout) -> None:
    """Check that the shapes, dtypes and devices of the weights match the validated inputs."""
    assert options.norm is not None
    over = options.norm.over
    if options.dim == -2:
        raise ValueError(
            "norm: expected None with a softmax over the sequence (dim=-2), got a Norm; omit norm, or use dim=-1"
        )
    first: Tensor | None = None
    for j, t in enumerate(weights[: 2 * len(xs)]):
        if t is None:
            continue
        i, x = j // 2, xs[j // 2]
        label = f"norm.{('weight', 'bias')[j % 2]}" + (f"[{i}] (of {'qk'[i]})" if len(xs) == 2 else "")
        heads, head_dim = x.shape[1], x.shape[3]
        check_dense(label, t, _FORMS[over], x)
        if t.dtype not in _DTYPES:
            raise TypeError(f"{label}: expected float16, bfloat16, float32 or float64, got {t.dtype}")
        fits = 1 <= t.ndim <= 3 and t.shape[-1] == head_dim
        if t.ndim == 1:
            fits = fits and over == "head"
        elif fits:
            fits = t.shape[-2] == heads or (over == "head" and t.ndim == 3 and t.shape[-2] == 1)
        if t.ndim == 3:
            fits = fits and t.shape[0] in (2, 3)
        if not fits:
            raise ValueError(
                f"{label}: expected shape {_FORMS[over]} with H = {heads} and D = {head_dim} for a norm over "
                f"{'a head' if over == 'head' else 'all heads'}, got {tuple(t.shape)}"
            )
        first = t if first is None else first
        is_alike = t.ndim == first.ndim and t.dtype == first.dtype
        if t.ndim == 3:
            # torch 2.11 can't trace a comparison of two symbolic booleans.
            by_head = [own.shape[1] > 1 or heads == 1 for own in (t, first)]
            is_alike = is_alike and t.shape[0] == first.shape[0] and all(by_head) == any(by_head)
        if not is_alike:
            raise ValueError(
                f"{label}: expected the same shape and dtype as the norm's other tensors, {tuple(first.shape)} "
                f"{first.dtype}, got {tuple(t.shape)} {t.dtype}"
            )
    if weights.token_groups == 2 and layout.start + layout.num_tokens > layout.prefix + layout.num_grid_tokens:
        raise ValueError(
            "norm.weight: expected 3 groups of tokens, shape (3, 1 or H, D), because a suffix follows the grid, got 2"
        )


def apply_norm(options: Any, weights: Weights, xs: tuple[Tensor, ...], positions: Any) -> tuple[Tensor, ...]:
    """Compute norm(x) of each tensor with PyTorch operators, in the accumulator's dtype."""
    assert options.norm is not None
    spec = Spec("none", **norm_fields(options.norm))
    outputs: list[Tensor] = []
    for i, x in enumerate(xs):
        x_positions = positions[i] if type(positions) is tuple else positions
        layout = _make_layout(x_positions, x.shape[2])
        x_weights = of_tensor(weights, i)
        check_weights(options, x_weights, (x,), layout)
        with no_autocast(x):
            outputs.append(normalise(spec, x.to(accumulator(x.dtype)), layout.scales(x_weights, x.device)[0]))
    return tuple(outputs)


def _make_layout(positions: Any, num_tokens: int) -> Layout:
    """Return a layout with the prefix and the suffix of positions that haven't been validated yet."""
    if isinstance(positions, Grid):
        return Layout(num_tokens, positions.prefix, positions.num_grid_tokens, positions.start, ())
    if isinstance(positions, Coordinates):
        return Layout(num_tokens, positions.prefix, positions.coords.shape[-2], 0, ())
    if isinstance(positions, CallerTables):
        return positions.lay_out(num_tokens)
    return Layout(num_tokens, 0, num_tokens, 0, ())
