"""Where the registered operators are: ``torch.ops.lrpe_md``.

A build for the Kernel Hub has a namespace of its own, in a file in the place of this one: scripts/kernel_hub.py.
"""

from typing import Any

import torch

__all__ = ["add_op_namespace_prefix", "ops"]

ops: Any = torch.ops.lrpe_md


def add_op_namespace_prefix(op_name: str) -> str:
    """``forward`` → ``lrpe_md::forward``."""
    return f"lrpe_md::{op_name}"
