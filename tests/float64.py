"""Run code in float64 that was written for float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Float64(TorchFunctionMode):
    """Replace float32 with float64 wherever code requests it, including ``x.float()``."""

    def __enter__(self) -> Any:
        self.was = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.was)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(_wider, (args, kwargs or {}))
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value
