"""Frequencies from the ``rope_parameters`` (formerly ``rope_scaling``) of a transformers config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import check_at_least, find_similar, is_finite_number, warn_caller
from .scalings import dynamic_ntk_scaling, linear_scaling, llama3_scaling, longrope_scaling, ntk_scaling, yarn_scaling
from .series import geometric_theta

__all__ = ["rope_frequencies"]


class _Model(NamedTuple):
    """Config fields and sequence lengths that a scaling rule needs in addition to the series."""

    fields: Mapping[str, Any]
    head_dim: int
    max_length: int | None
    length: int | None

    def need(self, name: str) -> Any:
        if self.fields.get(name) is None:
            raise ValueError(
                f"rope_parameters: expected a field {name!r} for rope_type {_type(self.fields)!r}, got the fields "
                f"{sorted(self.fields)}"
            )
        return self.fields[name]

    @property
    def original(self) -> float:
        """Sequence length that the model was trained on."""
        return self.fields.get("original_max_position_embeddings") or self.maximum

    @property
    def maximum(self) -> int:
        if self.max_length is None:
            raise ValueError(
                f"max_position_embeddings: expected a length for rope_type {_type(self.fields)!r}, got None"
            )
        return self.max_length

    @property
    def factor(self) -> float:
        """Scaling factor from the config, or by default the maximum length divided by the original length."""
        if self.fields.get("original_max_position_embeddings") is None:
            return self.need("factor")
        return self.fields.get("factor") or self.maximum / self.original


Rule = Callable[[Tensor, _Model], tuple[Tensor, float]]


def _dynamic(theta: Tensor, model: _Model) -> tuple[Tensor, float]:
    if model.fields.get("alpha"):  # HunYuan calls NTK scaling with a fixed factor "dynamic"
        return ntk_scaling(theta, model.fields["alpha"])
    length = model.length or model.maximum
    return dynamic_ntk_scaling(theta, model.need("factor"), length=length, original_length=model.maximum)


def _yarn(theta: Tensor, model: _Model) -> tuple[Tensor, float]:
    fields, factor = model.fields, model.factor
    theta, amplitude = yarn_scaling(
        theta, factor, original_length=model.original, fast=fields.get("beta_fast") or 32.0,
        slow=fields.get("beta_slow") or 1.0, truncate=fields.get("truncate", True),
    )  # fmt: skip
    if fields.get("mscale") and fields.get("mscale_all_dim"):  # DeepSeek-V2 (arXiv 2405.04434)
        amplitude = _mscale(factor, fields["mscale"]) / _mscale(factor, fields["mscale_all_dim"])
    return theta, _given_amplitude(fields, amplitude)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _longrope(theta: Tensor, model: _Model) -> tuple[Tensor, float]:
    theta, amplitude = longrope_scaling(
        theta, model.need("short_factor"), model.need("long_factor"), factor=model.factor,
        length=model.length or 1, original_length=int(model.original),
    )  # fmt: skip
    return theta, _given_amplitude(model.fields, amplitude)


def _given_amplitude(fields: Mapping[str, Any], default: float) -> float:
    given = fields.get("attention_factor")
    return default if given is None else float(given)


def _llama3(theta: Tensor, model: _Model) -> tuple[Tensor, float]:
    return llama3_scaling(
        theta, model.need("factor"), low=model.need("low_freq_factor"), high=model.need("high_freq_factor"),
        original_length=model.original,
    )  # fmt: skip


def _proportional(theta: Tensor, model: _Model) -> tuple[Tensor, float]:
    """Keep the fastest frequencies of a series that spans head_dim, and set all others to zero (no rotation)."""
    num = int((model.fields.get("partial_rotary_factor") or 1.0) * model.head_dim // 2)
    theta, amplitude = linear_scaling(theta, model.fields.get("factor") or 1.0)
    return F.pad(theta[:num], (0, len(theta) - num)), amplitude


RULES: dict[str, Rule] = {
    "default": lambda theta, model: (theta, 1.0),
    "linear": lambda theta, model: linear_scaling(theta, model.need("factor")),
    "ntk": lambda theta, model: ntk_scaling(theta, model.need("factor")),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
FIELDS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "short_factor", "long_factor",
    "low_freq_factor", "high_freq_factor", "alpha",
)  # fmt: skip
WHOLE = ("proportional",)  # partial_rotary_factor limits the frequencies here, not the channels


def rope_frequencies(
    rope_parameters: Mapping[str, Any] | None,
    head_dim: int,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
    *,
    base: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, float]:
    """Return a text model's theta (R/2,) and amplitude, computed from its config.

        theta, amplitude = rope_frequencies(config.rope_parameters, head_dim, config.max_position_embeddings)
        rope = Rotate1d(head_dim, theta=theta, amplitude=amplitude, rotary_dim=2 * len(theta))
        rope.set_frequencies(*rope_frequencies({"rope_type": "yarn", "factor": 8.0, ...}, head_dim, ...))

    Args:
        rope_parameters: ``rope_type`` (or ``type``) "default", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3"
            or "proportional", and the fields that this type uses: ``rope_theta``, ``partial_rotary_factor``,
            ``factor``, ``original_max_position_embeddings``, ``attention_factor``, ``beta_fast``, ``beta_slow``,
            ``truncate``, ``mscale``, ``mscale_all_dim``, ``short_factor``, ``long_factor``, ``low_freq_factor``,
            ``high_freq_factor`` and ``alpha`` (HunYuan's "dynamic"). Other fields are ignored, with a warning if their
            names resemble known ones. None means "default". If a config has a dict for each layer type, as in Gemma 3,
            call this function once per dict.
        head_dim: number of channels per head, D. The rotated width R is ``int(D * partial_rotary_factor)``, or D
            without that field. For "proportional", R is always D, and the remaining channels have θ = 0.
        max_position_embeddings: maximum length in the config. "dynamic" only scales sequences that exceed it. It is
            also the default of ``original_max_position_embeddings``.
        seq_len: current length, for "dynamic" and "longrope". By default, "dynamic" uses the maximum length, and
            "longrope" uses the short factors.
        base: base to use if ``rope_parameters`` has no ``rope_theta``. Older configs store rope_theta outside the dict;
            for these, pass ``rope_frequencies(config.rope_scaling, ..., base=config.rope_theta)``.

    Returns:
        theta (R/2,) on the CPU, computed in float64, and the amplitude, which multiplies the rotated channels of q and
        k. None of the types rescales positions.

    Raises:
        TypeError: if rope_parameters is not a dict.
        ValueError: if the type is unknown, if a field or the base is missing, if there is a ``factor`` without a type,
            if the width is odd, or if rope_parameters has a dict for each layer type.

    Sources: the papers cited in :func:`lrpe_md.linear_scaling` and the other scalings. The fields are the same as in
    ``modeling_rope_utils.py`` of transformers 5.23, which has no "ntk" type. The results are the same up to float32
    rounding, with one exception: if all frequencies make more than ``beta_fast`` turns, "yarn" keeps them, as in the
    paper, while transformers can divide all of them by the factor. This requires a very small base, such as 10.
    """
    fields = _checked_fields(rope_parameters)
    kind = _type(fields)
    lengths = {"max_position_embeddings": max_position_embeddings, "seq_len": seq_len}
    check_at_least(1, head_dim=head_dim, **{name: value for name, value in lengths.items() if value is not None})
    width = _rotated_width(fields, head_dim, kind)
    base = fields.get("rope_theta") or base
    if base is None:
        raise ValueError(
            f"base: expected the model's rope_theta, which rope_parameters doesn't contain, got None (fields "
            f"{sorted(fields)}). Older configs keep it outside the dict: pass base=config.rope_theta"
        )
    with torch.device("cpu"):  # the default device may be meta
        theta = geometric_theta(width // 2, base)
        theta, amplitude = RULES[kind](theta, _Model(fields, head_dim, max_position_embeddings, seq_len))
    return theta.to(dtype), amplitude


def _checked_fields(rope_parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if rope_parameters is not None and not isinstance(rope_parameters, Mapping):
        raise TypeError(
            f"rope_parameters: expected a dict, got {type(rope_parameters).__name__}; for a config, pass "
            "config.rope_parameters"
        )
    fields = rope_parameters or {}
    if layer_types := [name for name, value in fields.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"rope_parameters: expected the fields of one layer type, got a dict for each of {layer_types}; pass one "
            f"of them, such as config.rope_parameters[{layer_types[0]!r}]"
        )
    for name in fields:
        if name not in FIELDS and (close := find_similar(name, FIELDS)):
            warn_caller(f"rope_parameters: the field {name!r} is ignored; did you mean {close!r}?")
    kind = _type(fields)
    if kind not in RULES:
        raise ValueError(f"rope_type: expected one of {tuple(RULES)}, got {kind!r}")
    if fields.get("factor") is not None and not (fields.get("rope_type") or fields.get("type")):
        raise ValueError(
            "rope_type: expected a scaling type that uses 'factor', got None; add rope_type, such as 'linear', or "
            "remove factor"
        )
    return fields


def _rotated_width(fields: Mapping[str, Any], head_dim: int, kind: str) -> int:
    fraction = fields.get("partial_rotary_factor") or 1.0
    if not is_finite_number(fraction):
        raise ValueError(f"partial_rotary_factor: expected a finite positive number, got {fraction!r}")
    width = head_dim if kind in WHOLE else int(head_dim * fraction)
    if width > head_dim:
        raise ValueError(f"partial_rotary_factor: expected at most 1, got {fraction!r}")
    if width < 2 or width % 2:
        raise ValueError(
            f"head_dim: expected an even number of rotated channels, got {width} of {head_dim} "
            f"(partial_rotary_factor {fields.get('partial_rotary_factor')})"
        )
    return width


def _type(fields: Mapping[str, Any]) -> str:
    return fields.get("rope_type") or fields.get("type") or "default"
