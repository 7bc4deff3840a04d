"""Triton's interpreter without what it does over and over, or for nothing, a third of the time; before 3.9, mended."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


class PatchOnce:
    """Stands in for ``interpreter._patch_lang``, which replaces the functions of ``triton.language`` when a kernel is
    launched and again, to the same effect, whenever a kernel calls another: what is replaced stays until the launch
    ends.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self.patch = patch
        self.languages: set[int] = set()
        self.scopes: list[Any] = []

    def __call__(self, fn: Any) -> "PatchOnce":
        """At a launch, which restores what this returns, and at each nested call, which doesn't."""
        # By identity: not every global of a module of kernels can be compared.
        languages = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not languages or not languages <= self.languages:
            self.scopes.append(self.patch(fn))
            self.languages |= languages
        return self

    def restore(self) -> None:
        self.languages.clear()
        while self.scopes:
            self.scopes.pop().restore()


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where Triton has none of what is replaced: better than tests that silently take three times as long."""
    monkeypatch.setattr(interpreter, "_patch_lang", PatchOnce(interpreter._patch_lang))
    builder = interpreter.interpreter_builder
    # Each sum and product of integers is formed again in 64 bits for an assertion that only debug turns on.
    assert builder.options.sanitize_overflow
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    if not hasattr(interpreter._interpreter, "fma_fp32"):
        mend(monkeypatch)


def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """Rounded once: the product of two float32 is exact in np.longdouble."""
    a, b, c = (v.data.astype(np.longdouble) for v in (x, y, z))
    return interpreter.TensorHandle((a * b + c).astype(z.data.dtype), z.dtype.scalar)


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Triton 3.9 an fma rounds twice, and numpy 2.4 takes no tensor for an index."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    monkeypatch.setattr(type(interpreter.interpreter_builder), "create_fma", fma)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
