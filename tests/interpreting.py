"""Triton's interpreter without what it does over and over, or for nothing: a third of the time."""

import dataclasses
from collections.abc import Callable
from typing import Any

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
