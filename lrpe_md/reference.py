"""Reference implementation in plain PyTorch. It supports any float dtype and derivatives of any order.

    Θ[n, h, c] = Σ_j s_j[n] · ω[h, c, j] + φ[h, c]     for grid tokens; Θ = 0 for prefix and suffix tokens
    x̄ = act(x), or act(norm(x))
    cosine   y = [x̄ ⊙ cos Θ, x̄ ⊙ sin Θ]                                d -> 2d
    rotate   pairs (a, b) -> (a cos Θ - b sin Θ, a sin Θ + b cos Θ)      d -> d

Channels that are not mapped become x̄. An amplitude a[h, c] multiplies cos Θ and sin Θ of grid tokens. Callers may pass
tables of cos Θ and sin Θ instead. Rotation tables with one entry per channel map a pair (a, b) to (a cos_a - b sin_a, a
sin_b + b cos_b).

In shapes, B is the batch size, and H, N and K are the numbers of heads, tokens and axes. D is head_dim, and C is the
number of mapped channels (cosine) or pairs (rotate). Angles and the sums of their gradients are float64. x is upcast to
at least float32, and cos Θ and sin Θ have the dtype of the upcast x. The result has x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "ACTIVATIONS", "MAPS", "NORMS", "Act", "ActivationFunction", "Map", "MapName", "Scales", "Spec", "activate",
    "activate_and_map", "angles", "cos_sin", "cosine", "encode", "encode_tables", "fold", "join_pairs", "no_autocast",
    "normalise", "rotate", "split_pairs",
]  # fmt: skip


MapName = Literal["cosine", "rotate", "none"]
Act = Literal["none", "relu", "sigmoid", "silu", "softplus", "softmax"]


class Spec(NamedTuple):
    """Description of the computation: map, activation, layout and norm."""

    map: MapName
    act: Act = "none"
    dim: int = 0  # softmax over -1 (features) or -2 (sequence); 0 otherwise
    pairs: str = "half"  # | "interleaved" | "blocks"
    rotary_start: int = 0  # the first channel that is mapped
    num_channels: int = 0  # C: mapped channels for cosine, pairs for rotate
    sections: tuple[int, ...] = ()  # number of pairs in each block, for pairs "blocks"
    order: str = "cos_sin"  # | "sin_cos"
    norm: str = "none"  # | one of NORMS
    norm_over: str = "head"  # | "heads"
    norm_eps: float = 0.0
    norm_offset: float = 0.0  # added to the norm's weight

    def out_dim(self, head_dim: int) -> int:
        return head_dim + self.num_channels if MAPS[self.map].widens else head_dim

    def head_dim(self, out_dim: int) -> int:
        return out_dim - self.num_channels if MAPS[self.map].widens else out_dim

    def without_norm(self) -> Spec:
        return self._replace(norm="none", norm_over="head", norm_eps=0.0, norm_offset=0.0)

    def without_map(self) -> Spec:
        """Return a spec with only the norm."""
        norm, over, eps, offset = self[-4:]
        return Spec("none", norm=norm, norm_over=over, norm_eps=eps, norm_offset=offset)


def widen(omega: Tensor) -> Tensor:
    """Cast frequencies that q and k share to float64, so that the gradients from q and k are summed before rounding.

    For a rotation, these two gradients partly cancel each other.
    """
    return omega.to(torch.float64)


def angles(
    coords: Tensor,
    omega: Tensor,
    phase: Tensor | None = None,
    rotated: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return Θ (..., H, N, C) for positions (..., N, K), omega (H, C, K), phase (H, C) and grid mask (N,) or (B, N)."""
    coords, omega = coords.to(dtype), omega.to(dtype)
    theta = torch.zeros((), dtype=dtype, device=omega.device)
    for j in range(omega.shape[-1]):
        theta = theta + coords[..., None, :, None, j] * omega[:, None, :, j]
    if phase is not None:
        theta = theta + phase.to(dtype)[:, None, :]
    return theta if rotated is None else torch.where(rotated[..., None, :, None], theta, 0)


def cos_sin(
    theta: Tensor, amplitude: Tensor | None = None, rotated: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return cos Θ and sin Θ (..., H, N, C). For tokens on the grid, multiply both by the amplitude (H or fewer, C)."""
    if amplitude is None:
        return theta.cos(), theta.sin()
    gain = amplitude.to(theta.dtype).repeat_interleave(theta.shape[-3] // amplitude.shape[0], dim=0)[:, None, :]
    if rotated is not None:
        gain = torch.where(rotated[..., None, :, None], gain, 1)
    return theta.cos() * gain, theta.sin() * gain


# 2π as a sum of three float32 numbers, because ONNX exporters round constants to float32, even beside float64 tensors.
_TURN = (6.2831854820251465, -1.7484555314695172e-07, -6.8604980400235275e-15)


def fold(theta: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float64 angles to ``dtype``, after removing whole turns so that the cast loses little precision."""
    if theta.dtype == dtype:
        return theta
    turns = (theta.detach() * (0.5 / torch.pi)).round()  # torch.jit.trace would take a 2π here for _TURN[0]
    for part in _TURN:
        theta = theta - turns * part
    return theta.to(dtype)


class ActivationFunction(NamedTuple):
    """Activation function x̄ = act(x). ``engine/kernels/activations.py`` has a branch for each activation.

    Softmax is not elementwise, so its kernels are in ``engine/kernels/softmax.py``.
    """

    forward: Callable[[Tensor, int | None], Tensor]  # x̄ from x and dim
    never_negative: bool = False
    dims: tuple[int, ...] = ()  # valid values of dim; empty if elementwise


ACTIVATIONS: dict[str, ActivationFunction] = {
    "none": ActivationFunction(lambda x, dim: x),
    "relu": ActivationFunction(lambda x, dim: torch.relu(x), never_negative=True),
    "sigmoid": ActivationFunction(lambda x, dim: torch.sigmoid(x), never_negative=True),
    "silu": ActivationFunction(lambda x, dim: F.silu(x)),
    "softplus": ActivationFunction(
        lambda x, dim: F.softplus(x, threshold=40.0),  # the default threshold, 20, is off by 2e-9 in float64
        never_negative=True,
    ),
    "softmax": ActivationFunction(
        lambda x, dim: torch.softmax(x, -1 if dim is None else dim), never_negative=True, dims=(-1, -2)
    ),
}


def activate(x: Tensor, act: str, dim: int | None = None) -> Tensor:
    """Return x̄ = act(x). For softmax, ``dim`` is -1 (features) or -2 (sequence). Otherwise, it is None."""
    return ACTIVATIONS[act].forward(x, dim)


NORMS = ("rms", "layer")


class Scales(NamedTuple):
    """Weight γ and bias β of one tensor, of shape (D,), (H, D) or (P, 1 or H, D) for P groups of tokens."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    token_groups: Tensor | None = None  # (N,): the group of each token, if there are groups

    def by_token(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Return γ or β in a shape that broadcasts with x (B, H, N, D)."""
        t = t.to(dtype)
        if t.ndim == 3:
            assert self.token_groups is not None
            return t[self.token_groups].movedim(0, 1)
        return t[:, None, :] if t.ndim == 2 else t


NO_SCALES = Scales()


def normalise(spec: Spec, x: Tensor, scales: Scales = NO_SCALES) -> Tensor:
    """Return norm(x), computed in x's dtype."""
    over = (-1,) if spec.norm_over == "head" else (1, -1)
    if spec.norm == "layer":
        mean = x.mean(over, keepdim=True)
        # The second mean removes the rounding error of the first. Without it, equal channels would not become 0.
        x = x - (mean + (x - mean).mean(over, keepdim=True))
    normed = x * (x.square().mean(over, keepdim=True) + spec.norm_eps).rsqrt()
    if scales.weight is not None:
        normed = normed * (scales.by_token(scales.weight, x.dtype) + spec.norm_offset)
    if scales.bias is not None:
        normed = normed + scales.by_token(scales.bias, x.dtype)
    return normed


def cosine(x: Tensor, cos: Tensor, sin: Tensor, order: str = "cos_sin", start: int = 0) -> Tensor:
    """Apply the cosine map to C channels of x (..., D), beginning at ``start``, and return (..., D + C).

    The C channels become [x cos Θ, x sin Θ] or, with order "sin_cos", [x sin Θ, x cos Θ].
    """
    width = cos.shape[-1]
    before, mapped, after = ((), x, ()) if width == x.shape[-1] else _split_channels(x, start, width)
    first, second = (cos, sin) if order == "cos_sin" else (sin, cos)
    return torch.cat([*before, mapped * first, mapped * second, *after], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, spec: Spec) -> Tensor:
    """Rotate pairs of channels, beginning at ``spec.rotary_start``. The other channels stay unchanged."""
    start, width = spec.rotary_start, 2 * spec.num_channels
    before, turned, after = ((), x, ()) if width == x.shape[-1] else _split_channels(x, start, width)
    a, b = split_pairs(turned, spec.pairs, spec.sections)
    cos_a, cos_b = _split_entries(cos, spec)
    sin_a, sin_b = _split_entries(sin, spec)
    turned = join_pairs(a * cos_a - b * sin_a, a * sin_b + b * cos_b, spec.pairs, spec.sections)
    return torch.cat([*before, turned, *after], dim=-1)


def _split_channels(x: Tensor, start: int, width: int) -> tuple[tuple[Tensor], Tensor, tuple[Tensor]]:
    """Return the ``width`` channels of x (..., D) that begin at ``start``, between those before and after them.

    These are slices, because Inductor in torch 2.11 can return wrong gradients if both x and a part of x.split(..) are
    saved for the backward pass.
    """
    before, channels, after = x.tensor_split([start, start + width], dim=-1)
    return (before,), channels, (after,)


def _split_entries(t: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return the cos (or sin) of the first and of the second channel of each pair."""
    return (t, t) if t.shape[-1] == spec.num_channels else split_pairs(t, spec.pairs, spec.sections)


def split_pairs(x: Tensor, pairs: str, sections: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Split x (..., 2C) into the first and second channels of its pairs, a and b (..., C)."""
    if pairs == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    blocks = x.split([2 * n for n in sections], dim=-1) if pairs == "blocks" else [x]
    halves = [block.chunk(2, dim=-1) for block in blocks]
    return torch.cat([a for a, _ in halves], dim=-1), torch.cat([b for _, b in halves], dim=-1)


def join_pairs(a: Tensor, b: Tensor, pairs: str, sections: tuple[int, ...] = ()) -> Tensor:
    """Inverse of :func:`split_pairs`."""
    if pairs == "interleaved":
        return torch.stack([a, b], dim=-1).flatten(-2)
    blocks = [(a, b)]
    if pairs == "blocks":
        blocks = zip(a.split(sections, dim=-1), b.split(sections, dim=-1), strict=True)
    return torch.cat([half for block in blocks for half in block], dim=-1)


class Map(NamedTuple):
    """Map from x̄ to y. ``engine/kernels/encode.py`` has a branch for each map except "none"."""

    channels: Callable[[int], int]  # C, from the number of mapped channels
    apply: Callable[[Tensor, Tensor, Tensor, Spec], Tensor]  # y from x̄, cos Θ, sin Θ
    widens: bool = False  # y has C more channels than x


MAPS: dict[str, Map] = {
    "cosine": Map(
        lambda width: width,
        lambda x_bar, cos, sin, spec: cosine(x_bar, cos, sin, spec.order, spec.rotary_start),
        widens=True,
    ),
    "rotate": Map(lambda width: width // 2, rotate),
    # no angles: for linear attention and its norm over all heads
    "none": Map(lambda width: 0, lambda x_bar, cos, sin, spec: x_bar),
}


def no_autocast(x: Tensor):
    """Return a context that disables autocast, or a null context (which torch.export omits) if autocast is off."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def encode(
    spec: Spec,
    x: Tensor,
    coords: Tensor,
    rotated: Tensor | None,
    omega: Tensor,
    phase: Tensor | None = None,
    amplitude: Tensor | None = None,
    scales: Scales = NO_SCALES,
) -> Tensor:
    """Encode x (B, H, N, D) at positions ``coords`` (N, K) or (B, N, K) with frequencies omega (H or fewer, C, K)."""
    return activate_and_map(spec, x, coords, rotated, omega, phase, amplitude, scales)[1].to(x.dtype)


def activate_and_map(
    spec: Spec,
    x: Tensor,
    coords: Tensor,
    rotated: Tensor | None,
    omega: Tensor,
    phase: Tensor | None = None,
    amplitude: Tensor | None = None,
    scales: Scales = NO_SCALES,
) -> tuple[Tensor, Tensor]:
    """Return x̄ and y in at least float32. The arguments are the same as for :func:`encode`."""
    with no_autocast(x):
        dtype = torch.promote_types(x.dtype, torch.float32)
        theta = angles(coords, omega, phase, rotated)
        # Query head h uses the frequencies of key head h // (H_q / H_k).
        theta = fold(theta, dtype).repeat_interleave(x.shape[1] // theta.shape[-3], dim=-3)
        return _map(spec, x, *cos_sin(theta, amplitude, rotated), scales)


def _map(spec: Spec, x: Tensor, cos: Tensor, sin: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """Return x̄ and y in the dtype of cos and sin."""
    x = x.to(cos.dtype)
    if spec.norm != "none":
        x = normalise(spec, x, scales)
    x_bar = activate(x, spec.act, spec.dim or None)
    return x_bar, MAPS[spec.map].apply(x_bar, cos, sin, spec)


def encode_tables(spec: Spec, x: Tensor, cos: Tensor, sin: Tensor, first: int, scales: Scales = NO_SCALES) -> Tensor:
    """Encode x with tables of cos Θ and sin Θ instead of computed angles. Tokens without a row become x̄.

    ``cos`` and ``sin`` are (N', W), (B or 1, N', W) or (B or 1, H or fewer, N', W) in any float dtype. W is the number
    of pairs or of mapped channels. ``first`` is the row of token 0, which is negative if the first tokens have no row.
    """
    with no_autocast(x):
        return _map(spec, x, *place_tables(x, cos, sin, first), scales)[1].to(x.dtype)


def place_tables(x: Tensor, cos: Tensor, sin: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin (B or 1, H or 1, N, W) for the tokens of x, in at least float32."""
    dtype, num_tokens = torch.promote_types(x.dtype, torch.float32), x.shape[2]
    placed = []
    for t, missing in ((cos, 1.0), (sin, 0.0)):
        t = t[None, None] if t.ndim == 2 else t[:, None] if t.ndim == 3 else t
        begin, end = max(first, 0), max(min(first + num_tokens, t.shape[2]), 0)
        t = t[:, :, begin:end].to(dtype)
        before = min(max(-first, 0), num_tokens)
        t = F.pad(t, (0, 0, before, num_tokens - before - t.shape[2]), value=missing)
        if t.shape[1] > 1:
            t = t.repeat_interleave(x.shape[1] // t.shape[1], dim=1)
        placed.append(t)
    return placed[0], placed[1]
