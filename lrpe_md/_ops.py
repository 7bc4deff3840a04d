"""Namespace of the registered operators: ``torch.ops.lrpe_md``.

scripts/kernel_hub.py replaces this file in builds for the Kernel Hub, which assigns its own namespace.

"""

from typing import Any

import torch

__all__ = ["add_op_namespace_prefix", "ops"]

ops: Any = torch.ops.lrpe_md


def add_op_namespace_prefix(op_name: str) -> str:
    """Return a qualified name: ``forward`` → ``lrpe_md::forward``."""
    return f"lrpe_md::{op_name}"
