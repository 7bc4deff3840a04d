"""Change the frequencies, amplitudes and places of a whole model between two steps of diffusion or streaming.

The functions work for models with our encodings (``adapt``, ``models.vit``, ``models.video``, ``models.dit``,
``models.lm``). They also work for models from other libraries whose tables follow a known formula
(:mod:`.table_modules`): timm's ViTs with fixed frequencies, diffusers' FLUX, Wan, HunyuanVideo and models with the same
rotary modules, and vision towers of transformers. To scale a language model, change its configuration instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..frequencies.series import apply_scaling
from ..modules.base import FrequencyModule, copy_together
from ..presets.scheme import Scaling
from .rotary import parts
from .table_modules import makes_tables, stand_in

__all__ = ["Scaled", "prepare_scaling", "set_places", "set_scaling"]

Scalings = Scaling | Sequence[Scaling | None] | None


class Scaled(NamedTuple):
    """Prepared frequencies and amplitudes from :func:`prepare_scaling`."""

    pairs: list[tuple[Tensor, Tensor]]

    def apply(self) -> None:
        """Copy the values into the model, with one launch per dtype and without synchronisation."""
        with torch.no_grad():
            copy_together(self.pairs)


def set_scaling(model: Any, scaling: Scalings) -> None:
    """Scale the trained frequencies of all encodings in ``model``, in place.

    Nothing synchronises, and you don't need to recompile or recapture a CUDA graph. However, the first call adds
    buffers to the model, outside of its state_dict. Therefore, call ``set_scaling(model, None)`` once before
    ``torch.compile`` or a CUDA graph capture. Frozen programs (exported, or compiled with Inductor's ``freezing``) keep
    their values.

    Args:
        model: a module with encodings, or a diffusers pipeline.
        scaling: a function of theta (E,), or (H, E) if heads differ, such as a ``*_scaling`` function from
            ``lrpe_md.frequencies`` with its arguments bound. The function returns a scaled theta of the same shape, and
            an amplitude, which is a number or (E,). Pass one function for all axes, or one per axis, slowest first,
            with None for unchanged axes. Each function receives the frequencies of an axis in channel order, in float64
            on the model's device. None restores the trained frequencies. Learned frequencies stay trainable.

    An amplitude only affects the pairs of its own axis, and only in rotated tokens. A prefix, such as text that a
    preset places at zero, keeps an amplitude of 1.

    Raises:
        ValueError: if there is no encoding, the number of axes is wrong, frequencies combine several axes (mixed), or
            the model is an adapted language model.
    """
    prepare_scaling(model, scaling).apply()


@torch.no_grad()
def prepare_scaling(model: Any, scaling: Scalings) -> Scaled:
    """Prepare the changes of :func:`set_scaling`, so that ``prepare_scaling(...).apply()`` in a loop costs one launch.

    The result depends on the current frequencies and device, so call this again after an optimiser step or ``.to``.

        steps = [prepare_scaling(dit, (partial(dype_ntk_scaling, factor=2.0, time=t),) * 2) for t in times]
        for step, t in zip(steps, times):
            step.apply()
            ...
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for path, module in _find(model).items():
        by_axis: list[Any] = list(scaling) if isinstance(scaling, (list, tuple)) else [scaling] * module.num_axes
        if len(by_axis) != module.num_axes:
            raise ValueError(
                f"scaling: expected one value for each of the {module.num_axes} axes of {path}, got {len(by_axis)}"
            )
        pairs += module.adjusted(*_compute_scaling(path, module, by_axis))
    return Scaled(pairs)


def set_places(model: Any, axis: int, places: Tensor | None) -> None:
    """In all encodings, move index i of a grid axis to position ``places[i]``. None restores the original positions.

    Use this for coordinates that change between steps, such as the :func:`lrpe_md.positions.relative_times` of a
    stream, or for a jump between scenes. See :meth:`FrequencyModule.set_places`.

    Raises:
        ValueError: if there is no encoding, an encoding lacks the axis, places don't have the shape (n,), or the model
            receives coordinates instead of a grid, as FLUX does.
    """
    modules = {path: module for path, module in _find(model).items() if module.num_axes > 1}  # text has one axis
    if not modules:
        raise ValueError(f"model: expected a model with image or video encodings, found none in {type(model).__name__}")
    for path, module in modules.items():
        if not 0 <= axis < module.num_axes:
            raise ValueError(f"axis: expected a number from 0 to {module.num_axes - 1} for {path}, got {axis}")
    for module in modules.values():
        module.set_places(axis, places)


def _find(model: Any) -> dict[str, Any]:
    """Return all encodings by name. If there are none, add encodings to the modules that compute tables."""
    modules = {path: part for path, part in parts(model).items() if isinstance(part, nn.Module)}
    found: dict[str, Any] = {path: m for path, m in modules.items() if isinstance(m, FrequencyModule)}
    if not found:
        made = stand_in({path: m for path, m in modules.items() if makes_tables(m)}, _device_of(modules))
        found = {f"{path}.rotation".strip("."): own for path, own in made.items()}
    if not found:
        raise ValueError(f"model: expected a model with encodings, found none in {type(model).__name__}")
    return {path or type(model).__name__: module for path, module in found.items()}


def _device_of(modules: dict[str, nn.Module]) -> torch.device:
    """Return the device that a model runs on, even if accelerate has offloaded its parameters to the meta device."""
    hooks = [vars(module).get("_hf_hook") for module in modules.values()]
    devices = [device for hook in hooks if (device := getattr(hook, "execution_device", None)) is not None]
    if devices:
        return torch.device(devices[0])
    return next((p.device for module in modules.values() for p in module.parameters()), torch.device("cpu"))


def _compute_scaling(path: str, module: Any, scalings: list[Scaling | None]) -> tuple[Tensor | None, Any]:
    """Return the factors for a module's frequencies (H, C, K), and its amplitude (1, C)."""
    if not any(scalings):
        return None, None
    trained = module.trained().double()
    ratio = torch.ones_like(trained)
    gain = torch.ones_like(ratio[:1, :, 0])
    for axis, (scaling, channels) in enumerate(zip(scalings, _channels(path, module, trained), strict=True)):
        if scaling is not None and channels.numel():
            theta = trained[:, channels, axis]
            scaled, amplitude = apply_scaling(scaling, theta[0] if len(theta) == 1 else theta)
            factors = torch.where(theta == 0, 1.0, scaled.reshape(theta.shape) / theta)
            ratio[:, :, axis].index_copy_(1, channels, factors)
            gain.index_copy_(1, channels, torch.ones_like(factors[:1]) * amplitude)
    return ratio, gain


def _channels(path: str, module: Any, trained: Tensor) -> list[Tensor]:
    # The channels of each axis are read once per device. Channels with frequency 0 belong to no axis.
    known = vars(module).setdefault("_channels_of_axes", {})
    if trained.device not in known:
        used = (trained != 0).any(0)
        combined = bool(((trained != 0).sum(-1) > 1).any())
        if combined or bool((used.sum(-1) > 1).any()) or (used.shape[-1] > 1 and bool((used != (trained != 0)).any())):
            raise ValueError(
                "scaling: expected frequencies with one axis per channel, the same for all heads, got "
                f"{'mixed frequencies' if combined else 'axes that differ between heads'} in {path}; build this "
                "encoding with axial frequencies, or move its positions with set_places"
            )
        known[trained.device] = [column.nonzero()[:, 0] for column in used.unbind(-1)]
    return known[trained.device]
