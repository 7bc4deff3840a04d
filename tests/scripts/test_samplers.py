"""Samplers and predictions on data whose exact velocity is known, and the distance of images."""

import pytest
import torch
from lrpe_md.models.flow import NOISE_START, draw_times, flow_matching_loss, sample, time_grid, velocity_of
from lrpe_md.scripts.train.distance import RandomFeatures, frechet_distance
from lrpe_md.scripts.train.samplers import SAMPLERS, Sampling, draw_samples
from torch import nn

PREDICTIONS = ("velocity", "noise", "sample")
MEAN, DEVIATION = 2.0, 0.5


class Exact:
    """The best predictions for data from N(MEAN, DEVIATION²)."""

    def __init__(self, prediction):
        self.prediction = prediction

    def __call__(self, z, t, text=None):
        t = t.to(z.dtype)[:, None]
        variance = (1 - t) ** 2 * DEVIATION**2 + t**2
        rest = z - (1 - t) * MEAN
        x, noise = MEAN + (1 - t) * DEVIATION**2 / variance * rest, t / variance * rest
        return {"velocity": noise - x, "noise": noise, "sample": x}[self.prediction]


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_solve_a_known_equation(sampler, prediction):
    """The flow takes noise ε to MEAN + DEVIATION · ε. The error falls with the number of steps."""
    noise = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def error(steps):
        found = draw_samples(Exact(prediction), noise, None, Sampling(sampler, steps, 1.0, prediction))
        return (found - MEAN - DEVIATION * noise).abs().mean().item()

    first_order = sampler == "euler"
    # A model that predicts noise starts at NOISE_START. Noise instead of z leaves an error of 1 - NOISE_START.
    start = 1.1 * (1 - NOISE_START) if prediction == "noise" else 0
    assert error(40) < (0.02 if first_order else 0.003) + start
    assert error(80) < 0.7 * error(20) + start


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_many_steps_in_16_bits_do_not_add_up_rounding(sampler):
    noise = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = draw_samples(Exact("velocity"), noise, None, Sampling(sampler, 200))
    assert found.dtype == torch.bfloat16
    assert (found.double() - MEAN - DEVIATION * noise.double()).abs().mean() < 0.02


@pytest.mark.parametrize("shift", [0.5, 3.0])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_share_the_times(sampler, shift):
    noise, seen = torch.zeros(1, 1), []

    def model(z, t, text=None):
        seen.append(t.item())
        return z

    draw_samples(model, noise, None, Sampling(sampler, 5), shift=shift)
    torch.testing.assert_close(
        torch.tensor(seen)[:: 2 if sampler == "heun" else 1], time_grid(5, shift)[:-1].float(), rtol=0, atol=2e-6
    )


def test_eulers_method_equals_that_of_diffusers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    noise = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=10**6, shift=1.0)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 0, 9)[:-1].tolist())
    model, z = Exact("velocity"), noise
    for timestep in scheduler.timesteps:
        t = (timestep / 10**6).expand(5)
        z = scheduler.step(model(z, t), timestep, z, return_dict=False)[0]
    torch.testing.assert_close(sample(model, noise, steps=8), z.to(noise.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_exact_prediction_has_the_least_loss(prediction):
    generator = torch.Generator().manual_seed(1)
    x, noise = torch.randn(2, 4000, 1, generator=generator, dtype=torch.float64)
    x = MEAN + DEVIATION * x
    t = torch.full((4000,), 0.4, dtype=torch.float64)
    exact = Exact(prediction)
    least = flow_matching_loss(exact, x, None, t, noise, prediction=prediction).mean()
    for change in (lambda out: 1.1 * out, lambda out: out + 0.2, lambda out: 0.9 * out):
        found = flow_matching_loss(
            lambda z, t, text, change=change: change(exact(z, t)), x, None, t, noise, prediction=prediction
        )
        assert found.mean() > least
    z = torch.lerp(x, noise, t[:, None])
    torch.testing.assert_close(velocity_of(exact(z, t), z, t, prediction), Exact("velocity")(z, t))


def test_distributions_of_times():
    generator = torch.Generator().manual_seed(0)
    uniform = draw_times(20000, "uniform", generator=generator)
    logit = draw_times(20000, generator=generator)
    assert uniform.quantile(0.25) == pytest.approx(0.25, abs=0.02)
    assert logit.quantile(0.25) == pytest.approx(0.3375, abs=0.02)  # the sigmoid of the normal's quartile
    for times in (uniform, logit):
        assert times.min() >= 0
        assert times.max() <= 1
        assert times.median() == pytest.approx(0.5, abs=0.02)


def test_unknown_names_are_refused():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="prediction: expected 'velocity', 'noise' or 'sample', got 'epsilon'"):
        flow_matching_loss(Exact("noise"), x, None, torch.zeros(1), x, prediction="epsilon")
    with pytest.raises(ValueError, match="prediction: expected 'velocity', 'noise' or 'sample', got 'v'"):
        velocity_of(x, x, torch.zeros(1), "v")
    with pytest.raises(ValueError, match=r"got 'dpm\+\+'; only `lrpe-md train sample` supports dpm"):
        sample(Exact("velocity"), x, method="dpm++")
    with pytest.raises(ValueError, match="distribution: expected 'logit-normal' or 'uniform', got 'normal'"):
        draw_times(1, "normal")


def test_distance_of_images():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (300, 3, 16, 16), generator=generator, dtype=torch.uint8)
    assert frechet_distance([images], [images]) == pytest.approx(0, abs=1e-6)
    near, far = frechet_distance(images.split(64), [images // 2 + 64]), frechet_distance([images], [images // 8])
    assert 0 < near < far
    assert frechet_distance([images], [images // 8]) == far

    class Means(nn.Module):
        num_features = 3

        def forward(self, images):
            return images.float().mean((2, 3))

    shifted = frechet_distance([images // 2], [images // 2 + 10], features=Means())
    assert shifted == pytest.approx(300, rel=1e-3)  # the squared distance between the means; covariances are equal
    assert not any(parameter.requires_grad for parameter in RandomFeatures().parameters())
