"""The ``torch.ops.lrpe_md`` namespace, which contains the registered operators.

scripts/kernel_hub.py replaces this file in builds for the Kernel Hub, which assigns its own namespace.
"""

from typing import Any

import torch

__all__ = ["add_op_namespace_prefix", "ops"]

ops: Any = torch.ops.lrpe_md


def add_op_namespace_prefix(op_name: str) -> str:
    """Return an operator's qualified name, such as ``lrpe_md::forward`` for ``forward``."""
    return f"lrpe_md::{op_name}"
