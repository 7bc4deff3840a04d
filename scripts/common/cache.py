"""Disk cache for expensive tensors. Damaged files are detected and recomputed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .folder import SaveError, save_whole

DAY = 24 * 3600


def user_cache() -> Path:
    """Return the user's cache folder for lrpe-md."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lrpe-md"


def digest_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def kept(folder: Path | None, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    """Return ``make()``, or the result that an earlier call with the same key stored.

    If the stored file is damaged or incomplete, the tensor is recomputed. If the folder is not writable, nothing is
    cached.

    Args:
        folder: cache folder; None disables the cache.
        key: values that determine the tensor.
    """
    if folder is None:
        return make()
    name = hashlib.sha256(repr(key).encode()).hexdigest()
    path = folder / f"{name}.safetensors"
    found = _read(path, name)
    if found is not None:
        return found
    made = make()
    try:
        _sweep(folder)
        save_whole(path, lambda part: save_file({"value": made}, part, {"key": name, "digest": _digest(made)}))
    except (SaveError, SafetensorError, OSError) as error:
        typer.echo(f"Nothing is cached for later runs ({error})", err=True)
    return made


def _read(path: Path, name: str) -> Tensor | None:
    try:
        with safe_open(path, framework="pt") as file:
            about, value = file.metadata() or {}, file.get_tensor("value")
    except (SafetensorError, OSError, RuntimeError, ValueError):
        return None
    return value if about.get("key") == name and about.get("digest") == _digest(value) else None


def _digest(value: Tensor) -> str:
    content: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(repr((value.dtype, tuple(value.shape))).encode())
    digest.update(content)
    return digest.hexdigest()


def _sweep(folder: Path) -> None:
    """Delete old incomplete files that killed processes left behind."""
    for part in folder.glob("*.part"):
        if time.time() - part.stat().st_mtime > DAY:
            part.unlink(missing_ok=True)
