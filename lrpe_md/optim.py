"""Parameter groups for optimisers."""

from __future__ import annotations

from typing import Any

from torch import nn

from .checks import is_finite_number, show_value
from .modules.base import FrequencyModule

__all__ = ["parameter_groups"]


def parameter_groups(
    model: nn.Module, lr: float, *, weight_decay: float = 0.05, frequency_lr: float | None = None
) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into groups for any ``torch.optim`` optimiser.

        optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3, weight_decay=0.05, frequency_lr=1e-4))

    Args:
        model: the model. Parameters that don't require gradients are left out.
        lr: learning rate of all parameters except the frequencies.
        weight_decay: weight decay of tensors with two or more dimensions. It is 0 for biases, norms, frequencies,
            phases, parameters marked ``_no_weight_decay``, and parameters whose names ``no_weight_decay()`` of the
            model or of a submodule returns.
        frequency_lr: learning rate of frequencies learned by this library's encodings. The default is ``lr``.
            Frequencies are learned as logarithms, so an Adam step changes each frequency by about this fraction of its
            value. With ``frequencies="mixed"`` or ``learnable="raw"``, an Adam step changes each frequency by about
            this absolute amount.

    Returns:
        up to three groups, whose "name" is "decay", "no_decay" or "frequencies". Empty groups are left out.

    Raises:
        ValueError: for a negative or non-finite learning rate or weight decay.
        TypeError: if the model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}; pass the model itself")
    rates = {"lr": lr, "weight_decay": weight_decay, "frequency_lr": lr if frequency_lr is None else frequency_lr}
    for name, value in rates.items():
        if not is_finite_number(value) or value < 0:
            raise ValueError(f"{name}: expected a finite non-negative number, got {show_value(value)}")
    excluded = _find_excluded(model)
    frequencies = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, FrequencyModule)
        for name, parameter in module.named_parameters()
        # The module's own parameters are at the top, or below "parametrizations" if they have a parametrization.
        if name.startswith("parametrizations.") or "." not in name
        if "phase" not in name.split(".")
    }
    groups: dict[str, dict[str, Any]] = {
        "decay": {"params": [], "lr": lr, "weight_decay": weight_decay},
        "no_decay": {"params": [], "lr": lr, "weight_decay": 0.0},
        "frequencies": {"params": [], "lr": rates["frequency_lr"], "weight_decay": 0.0},
    }
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        marked = id(parameter) in excluded or getattr(parameter, "_no_weight_decay", False)
        kind = "no_decay" if marked or parameter.ndim < 2 else "decay"
        groups["frequencies" if id(parameter) in frequencies else kind]["params"].append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]


def _find_excluded(model: nn.Module) -> set[int]:
    """Return the ids of parameters that the model or a submodule excludes from weight decay.

    Names are looked up in the module that returns them, because torch.compile and DDP prefix the names of a model.
    """
    excluded: set[int] = set()
    for module in model.modules():
        if hasattr(module, "no_weight_decay"):
            owner: Any = module
            parameters = dict(module.named_parameters(remove_duplicate=False))
            excluded |= {id(parameters[name]) for name in set(owner.no_weight_decay()) & parameters.keys()}
    return excluded
