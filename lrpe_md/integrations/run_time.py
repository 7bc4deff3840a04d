"""Frequencies, amplitudes and places of a whole model, changed between two steps: of a diffusion, of a stream.

    from lrpe_md.integrations import set_places, set_scaling

    adapt_rotary(pipe.transformer)                                            # Wan: axes (t, h, w)
    riflex = partial(riflex_scaling, length=66, index=5)
    set_scaling(pipe.transformer, (riflex, None, None))                       # RIFLEx, of time alone
    set_scaling(model, None)                                                  # as trained
    set_places(model, 0, relative_times(frames, horizon=21))                  # ∞-RoPE

Models are those with encodings of ours (``adapt``, ``models.vit``, ``models.video``, ``models.dit``, ``models.lm``),
and those of other libraries whose cos and sin follow from a formula that is known (:mod:`.table_modules`): timm's ViTs
with fixed frequencies, diffusers' FLUX, Wan, HunyuanVideo and what has the same rotary modules, vision towers of
transformers. Language models scale by their configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..module_base import FrequencyModule, copy_together
from ..presets.scheme import Scaling
from .encoding import scale_series
from .rotary import is_pipeline, models_of, parts
from .table_modules import makes_tables, stand_in

__all__ = ["Scaled", "prepare_scaling", "set_places", "set_scaling"]

Scalings = Scaling | Sequence[Scaling | None] | None


class Scaled(NamedTuple):
    """Frequencies and amplitudes that are made, and wait to be put in place: :func:`prepare_scaling`."""

    pairs: list[tuple[Tensor, Tensor]]

    def apply(self) -> None:
        """One launch of copies on the device (one a dtype), which nothing waits for."""
        with torch.no_grad():
            copy_together(self.pairs)


def set_scaling(model: Any, scaling: Scalings) -> None:
    """Scale the trained frequencies of all encodings in ``model`` from now on, in place.

    Nothing waits for the device, and nothing is compiled or captured again, but for the first time: then a model gets
    buffers that a program made before does not read. So call ``set_scaling(model, None)`` before ``torch.compile`` and
    before a capture. They are not in the state_dict. Frozen programs (Inductor's ``freezing``, exported ones) keep
    what they had.

    Args:
        model: what it is made of says where encodings are; or a pipeline of diffusers.
        scaling: theta (E,), or (H, E) where heads differ → scaled theta of the same shape, and an amplitude, a number
            or (E,): one of ``lrpe_md.frequencies``' ``*_scaling`` with its numbers bound; one for all axes or a
            sequence of one an axis, slowest first, None for an axis that stays as it is. It is given the frequencies
            of an axis in the order of the channels, in float64 on their device.
            None: all as trained. What is learned goes on learning, and is scaled as it is now.

    The amplitude is that of the pairs of its axis, and of tokens that are rotated: a prefix, such as text that a preset
    has at zero, keeps 1.

    Raises:
        ValueError: no encoding, another number of axes, frequencies that have no axis each, as mixed ones, or those of
            an adapted language model.
    """
    prepare_scaling(model, scaling).apply()


@torch.no_grad()
def prepare_scaling(model: Any, scaling: Scalings) -> Scaled:
    """What :func:`set_scaling` would put in place, for later: ``prepare_scaling(..).apply()`` in a loop costs a launch.

    Of what the model has learned so far, and for where it is: prepare again behind an optimizer's step or ``.to``.

        steps = [prepare_scaling(dit, (partial(dype_ntk_scaling, factor=2.0, time=t),) * 2) for t in times]
        for step, t in zip(steps, times):
            step.apply()
            ...
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for path, module in _find(model):
        pairs += module.adjusted(*_scale(path, module, _by_axis(path, scaling, module.num_axes)))
    return Scaled(pairs)


def set_places(model: Any, axis: int, places: Tensor | None) -> None:
    """Index i of an axis of the grids of all encodings in ``model`` is at ``places[i]`` from now on; None: as it was.

    For coordinates that change between two steps: :func:`lrpe_md.positions.relative_times` of a stream, a jump between
    scenes. As :meth:`FrequencyModule.set_places` for each: in place where there were as many before.

    Raises:
        ValueError: no encoding, an axis that one of them lacks, or no (n,).
    """
    modules = [(path, module) for path, module in _find(model) if module.num_axes > 1]  # not of text
    if not modules:
        raise ValueError(f"model: expected encodings of images or videos, got none in {type(model).__name__}")
    for path, module in modules:
        if not 0 <= axis < module.num_axes:
            raise ValueError(f"axis: expected a number from 0 to {module.num_axes - 1} ({path}), got {axis}")
    for _, module in modules:
        module.set_places(axis, places)


def _find(model: Any) -> Iterator[tuple[str, Any]]:
    """Encodings by their names; modules that make tables get one."""
    if not isinstance(model, nn.Module) and not is_pipeline(model):
        raise TypeError(f"model: expected an nn.Module or a pipeline of diffusers, got {type(model).__name__}")
    everything = {path: part for path, part in parts(model).items() if isinstance(part, nn.Module)}
    found: dict[str, Any] = {path: part for path, part in everything.items() if isinstance(part, FrequencyModule)}
    if not found:
        device = next((p.device for own in models_of(model).values() for p in own.parameters()), torch.device("cpu"))
        makers = {path: part for path, part in everything.items() if makes_tables(part)}
        found = {f"{path}.rotation".strip("."): own for path, own in stand_in(makers, device).items()}
    if not found:
        raise ValueError(f"model: expected one with encodings, got none in {type(model).__name__}")
    return ((path or type(model).__name__, module) for path, module in found.items())


def _by_axis(path: str, scaling: Scalings, num_axes: int) -> list[Scaling | None]:
    given = list(scaling) if isinstance(scaling, Sequence) else [scaling] * num_axes
    if len(given) != num_axes:
        raise ValueError(f"scaling: expected one for each of {num_axes} axes ({path}), got {len(given)}")
    return given


def _scale(path: str, module: Any, scalings: list[Scaling | None]) -> tuple[Tensor | None, Any]:
    """What its frequencies (H, C, K) are multiplied by, and its amplitude (1, C)."""
    if not any(scalings):
        return None, None
    trained = module.trained().double()
    ratio = torch.ones_like(trained)
    gain = torch.ones_like(ratio[:1, :, 0])
    for axis, (scaling, channels) in enumerate(zip(scalings, _channels(path, module, trained), strict=True)):
        if scaling is None or not channels.numel():
            continue
        factors, amplitude = scale_series(trained[:, channels, axis], scaling)
        ratio[:, :, axis].index_copy_(1, channels, factors)
        own = torch.ones_like(factors[:1]) * amplitude
        gain.index_copy_(1, channels, own)
    return ratio, gain


def _channels(path: str, module: Any, trained: Tensor) -> list[Tensor]:
    """Channels of each axis, read once for a device: what is zero stays zero."""
    known = vars(module).setdefault("_channels_of_axes", {})
    if trained.device not in known:
        used = trained[0] != 0
        if bool((used.sum(-1) > 1).any()) or bool((used != (trained != 0)).any()):
            raise ValueError(
                f"{path}: expected frequencies of one axis a channel, the same in all heads, to scale them"
            )
        known[trained.device] = [column.nonzero()[:, 0] for column in used.unbind(-1)]
    return known[trained.device]
