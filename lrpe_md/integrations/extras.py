"""Optional dependencies. Each optional library has an extra of the same name."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["require"]


def require(library: str) -> None:
    """Raise a ModuleNotFoundError with install instructions if ``library`` is missing."""
    try:
        found = find_spec(library)
    except ValueError:  # a module without a spec
        found = True
    if not found:
        message = f"{library} is not installed; run pip install 'lrpe-md[{library}]'"
        raise ModuleNotFoundError(message, name=library)
