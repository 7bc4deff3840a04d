"""Classes of transformers that look like what is known and are not, and what is special about each."""

from __future__ import annotations

__all__ = ["EXCEPTIONS"]

EXCEPTIONS: dict[str, str] = {}  # name of a rotary module's class, or of the class that has it
