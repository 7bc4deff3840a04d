"""Flow matching: the loss, guidance by text, and sampling.

Along the straight path z_t = (1 - t) x + t ε from an image (t = 0) to noise (t = 1) the velocity is v = ε - x (Lipman
et al., arXiv 2210.02747; Liu et al., arXiv 2209.03003). A model is called as ``model(z, t, text)`` and returns v, or
ε or x with ``prediction="noise"`` or "sample".

Shapes: B batch; x, z, ε (B, C, ..); t (B,).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import jvp

from .text import Text, join_texts

__all__ = [
    "NOISE_START", "draw_times", "flow_matching_loss", "guided", "integrate", "mean_flow_loss", "sample", "time_grid",
    "velocity_of",
]  # fmt: skip

Method = Literal["euler", "heun"]
Times = Literal["logit-normal", "uniform"]
Prediction = Literal["velocity", "noise", "sample"]
Velocity = Callable[[Tensor, Tensor], Tensor]
NOISE_START = 0.99  # a model that predicts noise cannot divide by 1 - t = 0


def draw_times(
    batch: int, distribution: Times = "logit-normal", *, generator: torch.Generator | None = None, device: Any = None
) -> Tensor:
    """Draw times of a training, (B,) float32.

    distribution: "logit-normal", sigmoid(n) with n ~ N(0, 1), most of them in the middle (SD3, arXiv 2403.03206), or
        "uniform" on [0, 1).
    """
    if distribution not in ("logit-normal", "uniform"):
        raise ValueError(f"distribution: expected 'logit-normal' or 'uniform', got {distribution!r}")
    if distribution == "uniform":
        return torch.rand(batch, generator=generator, device=device)
    return torch.randn(batch, generator=generator, device=device).sigmoid()


def _check_prediction(prediction: str) -> None:
    if prediction not in ("velocity", "noise", "sample"):
        raise ValueError(f"prediction: expected 'velocity', 'noise' or 'sample', got {prediction!r}")


def velocity_of(output: Tensor, z: Tensor, t: Tensor, prediction: Prediction = "velocity") -> Tensor:
    """Return the velocity at z and t (B,) from the output of a model.

    From noise ε it is (ε - z) / (1 - t), from a sample x it is (z - x) / t: t must be below 1, or above 0.
    """
    _check_prediction(prediction)
    if prediction == "velocity":
        return output
    return (output - z) / _like(1 - t, z) if prediction == "noise" else (z - output) / _like(t, z)


def flow_matching_loss(
    model: Any,
    x: Tensor,
    text: Any,
    t: Tensor,
    noise: Tensor,
    *,
    drop: Tensor | None = None,
    prediction: Prediction = "velocity",
) -> Tensor:
    """Return the mean square error of the model's prediction by sample: (B,), in float32 at least.

    Args:
        x: images (B, C, ..).
        text: what the model takes as text.
        t: (B,), from 0 (image) to 1 (noise).
        noise: ε, like x.
        drop: (B,) bool, True for samples whose text is emptied. Guidance needs a tenth of them in training.
        prediction: what the model learns: "velocity" (ε - x), "noise" (ε) or "sample" (x).
    """
    _check_prediction(prediction)
    z = torch.lerp(x, noise, _like(t, x))
    wanted = {"velocity": lambda: noise - x, "noise": lambda: noise, "sample": lambda: x}[prediction]()
    return _mean_square(model(z, t, text, **_dropped(drop)), wanted)


def _dropped(drop: Tensor | None) -> dict[str, Tensor]:
    """Return drop as a keyword argument, or none: other models do not take it."""
    return {} if drop is None else {"drop": drop}


def mean_flow_loss(
    model: Any, x: Tensor, text: Any, r: Tensor, t: Tensor, noise: Tensor, *, drop: Tensor | None = None
) -> Tensor:
    """MeanFlow: the model ``model(z, t, text, r)`` learns the mean velocity u from t down to r: (B,).

    u satisfies u = v - (t - r) du/dt; du/dt comes from a forward-mode derivative along (v, 1), taken as constant. One
    step z_0 = z_1 - u(z_1, r=0, t=1) then samples.

    Source: Geng et al., arXiv 2505.13447 (without guidance and adaptive weights).
    """
    z, v = torch.lerp(x, noise, _like(t, x)), noise - x
    u, du, *_ = jvp(lambda z, t: model(z, t, text, r, **_dropped(drop)), (z, t), (v, torch.ones_like(t)))
    return _mean_square(u, v - _like(t - r, x) * du.detach())


def _like(t: Tensor, x: Tensor) -> Tensor:
    return t.to(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))


def _mean_square(found: Tensor, wanted: Tensor) -> Tensor:
    dtype = torch.promote_types(wanted.dtype, torch.float32)
    return (found.to(dtype) - wanted.to(dtype)).square().flatten(1).mean(1)


def guided(model: Any, text: Any = None, scale: float = 1.0, negative: Any = None) -> Velocity:
    """Return (z, t) → v without the text + scale · (v with the text - v without it), the text encoded once.

    If the model predicts noise or samples, the result does, too; see :func:`velocity_of`.

    Args:
        model: a :class:`lrpe_md.models.dit.DiT`.
        text: what the model takes as text, B samples; None: the empty condition.
        scale: 1 is the conditional model itself, at half the cost.
        negative: text to steer away from, of B samples or of one. Default: the empty condition of the model's
            text_encoder.

    Raises:
        TypeError: a text_encoder without a method ``empty``, and no negative.
        ValueError: negative texts of another number.

    Source: Ho and Salimans, classifier-free guidance (arXiv 2207.12598).
    """
    if scale == 1 or (text is None and negative is None):
        known = None if text is None else model.encode_text(text)
        return lambda z, t: model(z, t, known)
    wanted: Text = model.encode_text(negative if text is None else text)
    batch = wanted.batch_size
    away: Text = model.empty_text(batch, text) if negative is None else model.encode_text(negative)
    if text is None:
        wanted = model.empty_text(batch)
    if away.batch_size not in (1, batch):
        raise ValueError(f"negative: expected 1 text, or {batch} as in text, got {away.batch_size}")
    away = Text(*(None if value is None else value.expand(batch, *value.shape[1:]) for value in away))
    both = join_texts(wanted, away)

    def velocity(z: Tensor, t: Tensor) -> Tensor:
        with_text, without = model(torch.cat([z, z]), torch.cat([t, t]), both).chunk(2)
        return without + scale * (with_text - without)

    return velocity


def time_grid(steps: int, shift: float = 1.0) -> Tensor:
    """Times from 1 to 0: (steps + 1,) float64.

    shift: t → shift · t / (1 + (shift - 1) t), more steps near the noise, for larger images √(m/n) where they have m
        pixels instead of n (SD3, arXiv 2403.03206, eq. 23).
    """
    if steps < 1 or not shift > 0:
        raise ValueError(f"steps, shift: expected at least 1 and a positive number, got {steps}, {shift}")
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * t / (1 + (shift - 1) * t)


def integrate(velocity: Velocity, z: Tensor, times: Tensor, method: Method = "heun") -> Tensor:
    """dz/dt = velocity(z, t) along ``times`` (S,): "euler", order 1, or "heun", order 2 and two calls a step.

    velocity is called with t (B,).
    """
    if method not in ("euler", "heun"):
        raise ValueError(f"method: expected 'euler' or 'heun', got {method!r}")
    times = times.to(z.device, torch.promote_types(z.dtype, torch.float32))[:, None].expand(-1, z.shape[0])
    for now, then in pairwise(times):
        step = _like(then - now, z)
        slope = velocity(z, now)
        if method == "heun":
            slope = (slope + velocity(z + step * slope, then)) / 2
        z = z + step * slope
    return z


@torch.no_grad()
def sample(
    model: Any,
    noise: Tensor,
    text: Any = None,
    *,
    scale: float = 1.0,
    negative: Any = None,
    steps: int = 50,
    method: Method = "euler",
    shift: float = 1.0,
    prediction: Prediction = "velocity",
) -> Tensor:
    """Return images from noise (B, C, ..), of any size that the model's patches divide.

    The text, scale and negative are those of :func:`guided`, the steps and the shift those of :func:`time_grid`, and
    the method that of :func:`integrate`. The prediction is the one that the model was trained with: noise says nothing
    about the image at t = 1, so sampling begins at ``NOISE_START``; a sample says nothing about the noise at t = 0, so
    the last step is Euler's.
    """
    predict, times = guided(model, text, scale, negative), time_grid(steps, shift)

    def velocity(z: Tensor, t: Tensor) -> Tensor:
        return velocity_of(predict(z, t), z, t, prediction)

    if prediction == "noise":
        times = times.clamp(max=NOISE_START)
    if prediction == "sample":
        return integrate(velocity, integrate(velocity, noise, times[:-1], method), times[-2:], "euler")
    return integrate(velocity, noise, times, method)
