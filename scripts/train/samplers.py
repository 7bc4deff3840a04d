"""Samplers by name: the Euler and Heun methods of :mod:`models.flow`, and diffusers schedulers."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...models.flow import NOISE_START, Prediction, guided, in_float32, sample, time_grid, velocity_of

METHODS = ("euler", "heun")
SCHEDULERS = {  # maps a name to a diffusers class and its arguments
    "dpm++": ("DPMSolverMultistepScheduler", {"solver_order": 2, "algorithm_type": "dpmsolver++"}),
    "unipc": ("UniPCMultistepScheduler", {"solver_order": 2}),
}
SAMPLERS = (*METHODS, *SCHEDULERS)


class Sampling(NamedTuple):
    """Sampling settings.

    Args:
        sampler: one of ``SAMPLERS``.
        steps: number of sampling steps.
        scale: guidance scale. 1 means no guidance.
        prediction: what the model predicts.
    """

    sampler: str = "heun"
    steps: int = 50
    scale: float = 1.0
    prediction: Prediction = "velocity"


@torch.no_grad()
def draw_samples(
    model: Any, noise: Tensor, text: Any, sampling: Sampling, *, negative: Any = None, shift: float = 1.0
) -> Tensor:
    """Draw samples from noise (B, C, ...).

    Args:
        text, negative: see :func:`models.flow.guided`.
        shift: shift of the sampling times; see :func:`models.flow.time_grid`.
    """
    if sampling.sampler in METHODS:
        method: Literal["euler", "heun"] = "heun" if sampling.sampler == "heun" else "euler"
        return sample(
            model, noise, text, scale=sampling.scale, negative=negative, steps=sampling.steps,
            method=method, shift=shift, prediction=sampling.prediction,
        )  # fmt: skip
    import diffusers

    name, arguments = SCHEDULERS[sampling.sampler]
    scheduler: Any = getattr(diffusers, name)(prediction_type="flow_prediction", use_flow_sigmas=True, **arguments)
    scheduler.set_timesteps(sampling.steps)
    scheduler.set_begin_index(0)  # needed because rounded timesteps can repeat
    # The schedulers choose different times, and start below t = 1. At exactly 1, their log(1 - t) is infinite.
    scheduler.sigmas = time_grid(sampling.steps, shift).clamp(max=1 - 1e-6)
    predict, z = in_float32(guided(model, text, sampling.scale, negative), noise)
    for timestep, sigma in zip(scheduler.timesteps, scheduler.sigmas.tolist(), strict=False):
        t = torch.full((len(z),), sigma, device=z.device)
        if sampling.prediction == "noise":
            t = t.clamp(max=NOISE_START)
        z = scheduler.step(velocity_of(predict(z, t), z, t, sampling.prediction), timestep, z, return_dict=False)[0]
    return z.to(noise.dtype)
