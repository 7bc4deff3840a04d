"""Losses, guidance and sampling for flow matching.

The straight path from an image (t = 0) to noise (t = 1) is z_t = (1 - t) x + t ε, and its velocity is v = ε - x (Lipman
et al., arXiv 2210.02747; Liu et al., arXiv 2209.03003). Models are called as ``model(z, t, text)``. With
``prediction="noise"``, models predict ε, and with ``prediction="sample"``, they predict x. The default prediction is
the attribute ``model.prediction``, or v for models without this attribute.

B is the batch size. The shape of x, z and ε is (B, C, ...), and the shape of t is (B,).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import jvp

from lrpe_md.checks import can_read

from .text import Text, join_texts

__all__ = [
    "NOISE_START", "check_times", "draw_times", "flow_matching_loss", "guided", "in_float32", "integrate",
    "mean_flow_loss", "sample", "time_grid", "velocity_of",
]  # fmt: skip

Method = Literal["euler", "heun"]
Times = Literal["logit-normal", "uniform"]
Prediction = Literal["velocity", "noise", "sample"]
Velocity = Callable[[Tensor, Tensor], Tensor]
NOISE_START = 0.99  # largest t if the model predicts noise, because the velocity divides by 1 - t


def draw_times(
    batch: int, distribution: Times = "logit-normal", *, generator: torch.Generator | None = None, device: Any = None
) -> Tensor:
    """Draw random times (B,) for training, in float32.

    distribution: "logit-normal" draws sigmoid(n) with n ~ N(0, 1), favouring the middle (SD3, arXiv 2403.03206).
        "uniform" draws from [0, 1).
    """
    if distribution not in ("logit-normal", "uniform"):
        raise ValueError(f"distribution: expected 'logit-normal' or 'uniform', got {distribution!r}")
    if distribution == "uniform":
        return torch.rand(batch, generator=generator, device=device)
    return torch.randn(batch, generator=generator, device=device).sigmoid()


def _check_prediction(prediction: str) -> None:
    if prediction not in ("velocity", "noise", "sample"):
        raise ValueError(f"prediction: expected 'velocity', 'noise' or 'sample', got {prediction!r}")


def _prediction_of(model: Any, prediction: Prediction | None) -> Prediction:
    """Return ``prediction``, or by default the attribute of the model, even if DistributedDataParallel wraps it."""
    found: Any = prediction or getattr(getattr(model, "module", model), "prediction", "velocity")
    _check_prediction(found)
    return found


def velocity_of(output: Tensor, z: Tensor, t: Tensor, prediction: Prediction = "velocity") -> Tensor:
    """Convert a model's output at z and t (B,) to a velocity.

    For noise ε, the velocity is (ε - z) / (1 - t), so t must be below 1. For a sample x, the velocity is (z - x) / t,
    so t must be above 0.
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
    prediction: Prediction | None = None,
) -> Tensor:
    """Return the mean squared error (B,) of the model's prediction for each sample, in at least float32.

    Args:
        x: images (B, C, ...).
        text: the model's text input.
        t: times (B,), from 0 (image) to 1 (noise).
        noise: noise ε, with x's shape.
        drop: mask (B,) of the samples whose text is replaced by the empty condition. To use guidance later, drop about
            a tenth of the captions in training.
        prediction: what the model predicts, "velocity" (ε - x), "noise" (ε) or "sample" (x). The default is
            ``model.prediction``, or "velocity" for a model without this attribute.

    Raises:
        TypeError: if x is not a floating-point tensor.
        ValueError: if noise, t or the model's output has the wrong shape, or if t is not between 0 and 1. The range is
            only checked for times on a CPU, because reading times on a GPU would force a synchronisation.
    """
    _check_loss(x, noise, t=t)
    prediction = _prediction_of(model, prediction)
    z = torch.lerp(x, noise, _like(t, x))
    wanted = {"velocity": lambda: noise - x, "noise": lambda: noise, "sample": lambda: x}[prediction]()
    return _mean_square(model(z, t, text, **_dropped(drop)), wanted)


def _dropped(drop: Tensor | None) -> dict[str, Tensor]:
    """Return the keyword arguments for ``drop``. Leave out None, because not all models accept the argument."""
    return {} if drop is None else {"drop": drop}


def mean_flow_loss(
    model: Any, x: Tensor, text: Any, r: Tensor, t: Tensor, noise: Tensor, *, drop: Tensor | None = None
) -> Tensor:
    """Return the MeanFlow loss (B,), which trains ``model(z, t, text, r)`` to predict the mean velocity u from t to r.

    The target for u is v - (t - r) du/dt. The derivative du/dt is computed with forward-mode differentiation along (v,
    1), and treated as a constant. A trained model samples in a single step: z_0 = z_1 - u(z_1, r=0, t=1).

    This function raises the same errors as :func:`flow_matching_loss`, with the same checks for r as for t.

    Source: Geng et al., arXiv 2505.13447, without guidance and adaptive weights.
    """
    _check_loss(x, noise, r=r, t=t)
    z, v = torch.lerp(x, noise, _like(t, x)), noise - x
    u, du, *_ = jvp(lambda z, t: model(z, t, text, r, **_dropped(drop)), (z, t), (v, torch.ones_like(t)))
    return _mean_square(u, v - _like(t - r, x) * du.detach())


def _like(t: Tensor, x: Tensor) -> Tensor:
    return t.to(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))


def check_times(name: str, t: Any, batch: int, limits: tuple[float, float] = (0.0, 1.0)) -> None:
    """Check that t is a floating-point tensor (B,) and, if the host can read it, within the limits."""
    if not isinstance(t, Tensor) or t.shape != (batch,) or not t.is_floating_point():
        found = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, Tensor) else repr(t)
        raise ValueError(
            f"{name}: expected a floating-point tensor of shape ({batch},), one value per sample, got {found}"
        )
    if can_read(t):
        least, most = limits
        wrong = t[~((t >= least) & (t <= most))]
        if len(wrong):
            advice = "; divide timesteps from 0 to 1000 by 1000" if wrong[0] > most else ""
            raise ValueError(f"{name}: expected times from 0 (image) to 1 (noise), got {wrong[0]:g}{advice}")


def _check_loss(x: Tensor, noise: Tensor, **times: Tensor) -> None:
    """Check the arguments of a loss, because tensors with the wrong shape could broadcast."""
    if not x.is_floating_point():
        raise TypeError(f"x: expected a floating-point tensor with values from about -1 to 1, got {x.dtype}")
    if noise.shape != x.shape:
        raise ValueError(
            f"noise: expected x's shape {tuple(x.shape)}, got {tuple(noise.shape)}; pass torch.randn_like(x)"
        )
    for name, t in times.items():
        check_times(name, t, len(x))


def _mean_square(found: Tensor, wanted: Tensor) -> Tensor:
    if found.shape != wanted.shape:
        raise ValueError(f"model: expected an output of x's shape {tuple(wanted.shape)}, got {tuple(found.shape)}")
    dtype = torch.promote_types(wanted.dtype, torch.float32)
    return (found.to(dtype) - wanted.to(dtype)).square().flatten(1).mean(1)


def guided(model: Any, text: Any = None, scale: float = 1.0, negative: Any = None) -> Velocity:
    """Return a function of (z, t) for v_neg + s · (v_text - v_neg), where s is the guidance scale.

    v_text and v_neg are the velocities with the text and with the negative text.
    Texts are encoded only once. If the model predicts noise or samples, so does the returned function; see
    :func:`velocity_of`.

    Args:
        model: a :class:`lrpe_md.models.dit.DiT`.
        text: the model's text input for B samples. None means the empty condition.
        scale: with 1, only the conditional model runs, which halves the cost, and negative has no effect.
        negative: text to steer away from, one for each of the B samples or one for all. The default is the empty
            condition of the model's text_encoder.

    Raises:
        TypeError: if ``negative`` is None and the text_encoder has no method ``empty``.
        ValueError: if the batch size of negative is neither 1 nor B, or if scale is not a finite number.

    Source: Ho and Salimans, Classifier-Free Diffusion Guidance (arXiv 2207.12598).
    """
    if getattr(scale, "ndim", 0) or not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale!r}")
    if scale == 1 and negative is not None:
        warnings.warn("negative has no effect with scale=1; pass another scale, such as scale=3.0", stacklevel=2)
    if scale == 1 or (text is None and negative is None):
        known = None if text is None else model.encode_text(text)
        return lambda z, t: model(z, t, known)
    wanted: Text = model.encode_text(negative if text is None else text)
    batch = wanted.batch_size
    away: Text = model.empty_text(batch, text) if negative is None else model.encode_text(negative)
    if text is None:
        wanted = model.empty_text(batch)
    if away.batch_size not in (1, batch):
        raise ValueError(f"negative: expected batch size 1, or {batch} like text, got {away.batch_size}")
    away = Text(*(None if value is None else value.expand(batch, *value.shape[1:]) for value in away))
    joined = join_texts(wanted, away)

    def velocity(z: Tensor, t: Tensor) -> Tensor:
        both = joined
        if text is None and batch == 1:  # one negative text for all samples
            both = Text(*(None if value is None else value.repeat_interleave(len(z), 0) for value in joined))
        elif len(z) != batch:
            name = "negative" if text is None else "text"
            raise ValueError(
                f"{name}: expected batch size {len(z)} (one caption per sample), got {batch}; repeat your captions"
            )
        with_text, without = model(torch.cat([z, z]), torch.cat([t, t]), both).chunk(2)
        return without + scale * (with_text - without)

    return velocity


def time_grid(steps: int, shift: float = 1.0) -> Tensor:
    """Return the sampling times (steps + 1,) from 1 to 0, in float64.

    ``shift`` changes each time t to shift · t / (1 + (shift - 1) t). With a shift above 1, more steps are close to the
    noise. If a shift of 1 suits images with n pixels, use √(m/n) for m pixels (SD3, arXiv 2403.03206, eq. 23).
    """
    if steps < 1 or not shift > 0:
        raise ValueError(f"steps, shift: expected steps >= 1 and shift > 0, got {steps}, {shift}")
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * t / (1 + (shift - 1) * t)


def integrate(velocity: Velocity, z: Tensor, times: Tensor, method: Method = "heun") -> Tensor:
    """Integrate dz/dt = velocity(z, t) along ``times`` (S,), and return the last z.

    ``velocity`` is called with times of shape (B,). The method is "euler" (first order), or "heun" (second order, with
    two calls per step).
    """
    if method not in ("euler", "heun"):
        others = "; only `lrpe-md train sample` supports dpm++ and unipc" if method in ("dpm++", "unipc") else ""
        raise ValueError(f"method: expected 'euler' or 'heun', got {method!r}{others}")
    times = times.to(z.device, torch.promote_types(z.dtype, torch.float32))[:, None].expand(-1, z.shape[0])
    for now, then in pairwise(times):
        step = _like(then - now, z)
        slope = velocity(z, now)
        if method == "heun":
            slope = (slope + velocity(z + step * slope, then)) / 2
        z = z + step * slope
    return z


def in_float32(predict: Velocity, noise: Tensor) -> tuple[Velocity, Tensor]:
    """Return the noise in at least float32, and a function that still passes z to the model in the noise's dtype.

    If a sampler kept z in 16 bits, small steps would be rounded away.
    """

    def predict_in_noise_dtype(z: Tensor, t: Tensor) -> Tensor:
        return predict(z.to(noise.dtype), t).to(z.dtype)

    return predict_in_noise_dtype, noise.to(torch.promote_types(noise.dtype, torch.float32))


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
    prediction: Prediction | None = None,
) -> Tensor:
    """Sample images from noise (B, C, ...). The model's patch size must divide the image size.

    :func:`guided` documents text, scale and negative, :func:`time_grid` documents steps and shift,
    :func:`integrate` documents method, and :func:`flow_matching_loss` documents the default of ``prediction``. The
    prediction must be the same as in training. A noise prediction does not determine the image at t = 1, so sampling
    starts at ``NOISE_START`` instead. A sample prediction does not determine the noise at t = 0, so the last step uses
    Euler's method.
    """
    found = _prediction_of(model, prediction)
    (predict, z), times = in_float32(guided(model, text, scale, negative), noise), time_grid(steps, shift)

    def velocity(z: Tensor, t: Tensor) -> Tensor:
        return velocity_of(predict(z, t), z, t, found)

    if found == "noise":
        times = times.clamp(max=NOISE_START)
    if found == "sample":
        z, times, method = integrate(velocity, z, times[:-1], method), times[-2:], "euler"
    return integrate(velocity, z, times, method).to(noise.dtype)
