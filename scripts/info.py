"""The program ``lrpe-md info``, which reports versions, devices and the implementation that runs here."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from lrpe_md import __version__
from lrpe_md.engine.core.operator import HAS_TRITON, INTERPRETING

__all__ = ["describe"]

PACKAGES = ("torch", "triton", "timm", "diffusers", "transformers")


def describe() -> str:
    """Return aligned lines to include in a bug report."""
    rows = {"lrpe-md": __version__, "Python": platform.python_version(), "system": platform.platform()}
    rows |= {name: _find_version(name) for name in PACKAGES}
    rows |= {f"GPU {i}": _describe_gpu(i) for i in range(torch.cuda.device_count())} or {"GPU": "none"}
    rows["kernels"] = _describe_kernels()
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _find_version(package: str) -> str:
    try:
        found = version(package)
    except PackageNotFoundError:
        return "not installed"
    if package != "torch":
        return found
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"{found} ({build if torch.version.cuda or torch.version.hip else 'CPU build'})"


def _describe_gpu(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB"


def _describe_kernels() -> str:
    if not HAS_TRITON:
        return "none: triton is not installed, so the reference implementation in PyTorch runs everywhere"
    if INTERPRETING:
        return "Triton's interpreter on the CPU (TRITON_INTERPRET is set)"
    if not torch.cuda.is_available():
        return "none: no GPU, so the reference implementation in PyTorch runs"
    return "Triton on the GPU, and the reference implementation in PyTorch on the CPU"
